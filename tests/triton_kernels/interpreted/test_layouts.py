"""Inputs of any strides, and rows that a dispatch brought: against the float64 reference, memory poisoned."""

from dataclasses import replace

import pytest
import torch

from routepack.triton_kernels import grouped_experts, launch_backward, launch_forward, moe_experts, reference
from routepack.triton_kernels.testing import random_problem, relative_error, relative_errors


def outputs(problem, w1, w3, w2, leaves, dout=None, **options):
    out = moe_experts(problem.x, problem.ids, problem.scores, w1, w3, w2, implementation="triton", **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.dout if dout is None else dout)]


def expected(problem):
    return problem.reference()


@pytest.mark.parametrize("tma", [False, True])
def test_gate_and_up_as_halves_of_one_weight(tma):
    problem = random_problem(T=20, D=40, F=24, K=2, E=3)
    w13 = torch.cat([problem.w1, problem.w3], dim=1).requires_grad_()
    actual = outputs(problem, w13[:, :24], w13[:, 24:], problem.w2, [w13], tma=tma)
    out, _, _, dw1, dw3, _ = expected(problem)
    assert max(relative_errors(actual, [out, torch.cat([dw1, dw3], dim=1)])) < 1e-5


@pytest.mark.parametrize("tma", [False, True])
def test_gate_and_up_interleaved(tma):
    problem = random_problem(T=20, D=40, F=24, K=2, E=3)
    w13 = torch.stack([problem.w1, problem.w3], dim=2).requires_grad_()
    actual = outputs(problem, w13[:, :, 0], w13[:, :, 1], problem.w2, [w13], tma=tma)
    out, _, _, dw1, dw3, _ = expected(problem)
    assert max(relative_errors(actual, [out, torch.stack([dw1, dw3], dim=2)])) < 1e-5


def test_weights_stored_transposed():
    problem = random_problem(T=20, D=40, F=24, K=2, E=3)
    stored = [w.mT.contiguous().requires_grad_() for w in (problem.w1, problem.w3, problem.w2)]
    actual = outputs(problem, *(w.mT for w in stored), stored)
    wanted = expected(problem)
    assert max(relative_errors(actual, [wanted[0], *(dw.mT for dw in wanted[3:])])) < 1e-5


def test_x_and_scores_with_strides_and_an_expanded_gradient():
    problem = random_problem(T=20, D=40, F=24, K=2, E=3)
    wide = torch.randn(40, 40, 2)
    wide[::2, :, 1] = problem.x
    scores = problem.scores.T.contiguous().T
    strided = replace(problem, x=wide[::2, :, 1].requires_grad_(), scores=scores, ids=problem.ids.to(torch.int32))
    actual = outputs(strided, problem.w1, problem.w3, problem.w2, [strided.x], dout=torch.ones(()).expand(20, 40))
    wanted = replace(problem, dout=torch.ones(20, 40)).reference()
    assert max(relative_errors(actual, wanted[:2])) < 1e-5


SCORES = {
    "column": lambda: torch.rand(20, 4)[:, 1:2],
    "step": lambda: torch.rand(20, 8)[:, ::4],
    "rows apart": lambda: torch.rand(40, 2)[::2],
    "expanded token": lambda: torch.rand(1, 2).expand(20, 2),
    "expanded number": lambda: torch.full((1, 1), 0.7).expand(20, 1),
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_scores_of_any_strides(scores):
    scores = scores()
    problem = random_problem(T=20, D=40, F=24, K=scores.shape[1], E=3)
    strided = replace(problem, scores=scores.requires_grad_())
    actual = outputs(strided, problem.w1, problem.w3, problem.w2, [strided.scores])
    wanted = strided.reference()
    assert max(relative_errors(actual, [wanted[0], wanted[2]])) < 1e-5


def test_row_scores_that_are_a_column():
    problem = random_problem(T=20, D=40, F=24, K=1, E=3).requiring_grad()
    counts, scores = torch.tensor([9, 4, 7]), torch.rand(20, 2)[:, 0].requires_grad_()
    weights = (problem.w1, problem.w3, problem.w2)
    out = grouped_experts(problem.x, counts, *weights, row_scores=scores, implementation="triton")
    wanted = reference.grouped_experts(problem.x, counts, *weights) * scores[:, None]
    leaves = [problem.x, scores, *weights]
    actual = [out, *torch.autograd.grad(out, leaves, problem.dout)]
    assert max(relative_errors(actual, [wanted, *torch.autograd.grad(wanted, leaves, problem.dout)])) < 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_slot_without_an_expert_may_have_any_score(value):
    problem = random_problem(T=20, D=40, F=24, K=2, E=3, routing="skipped")
    poisoned = replace(problem, scores=problem.scores.masked_fill(problem.ids < 0, value)).requiring_grad()
    actual = outputs(poisoned, poisoned.w1, poisoned.w3, poisoned.w2, poisoned.inputs)
    assert max(relative_errors(actual, problem.reference())) < 1e-5


def test_a_row_that_no_one_asks_for_may_have_any_score():
    problem = random_problem(T=6, D=40, F=24, K=1, E=2).requiring_grad()
    scores = torch.tensor([float("nan"), 1.0, 0.5, 0.25, 2.0, 1.0]).requires_grad_()
    weights = (problem.w1, problem.w3, problem.w2)
    out = grouped_experts(
        problem.x, torch.tensor([2, 1]), *weights,
        row_index=torch.tensor([-1, 3, 4]), row_scores=scores, implementation="triton",
    )  # fmt: skip
    assert all(torch.isfinite(one).all() for one in [out, *torch.autograd.grad(out.sum(), [problem.x, scores, *weights])])


def test_no_rows_but_an_index_of_none():
    problem = random_problem(T=0, D=8, F=6, K=1, E=2).requiring_grad()
    weights = (problem.w1, problem.w3, problem.w2)
    index = torch.tensor([-1, -1])
    out = grouped_experts(problem.x, torch.tensor([1, 1]), *weights, row_index=index, implementation="triton")
    out.sum().backward()
    assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in weights)
    offsets, order = torch.tensor([0, 1, 2], dtype=torch.int32), index.int()
    operands = (problem.x, None, *weights, offsets, order, None, 1, True, "triton", *(None,) * 5)
    assert torch.ops.routepack.experts(*operands)[1].shape == (2, 2, 6)


@pytest.mark.parametrize(("wanted", "expected"), [("tf32", "tf32"), ("ieee", "ieee"), ("none", "ieee")])
def test_fp32_products_as_torch_is_told(wanted, expected):
    matmul = torch.backends.cuda.matmul
    kept = matmul.fp32_precision
    try:
        matmul.fp32_precision = wanted
        assert launch_forward.precision(torch.float32) == expected
        assert launch_forward.precision(torch.bfloat16) == "ieee"
    finally:
        matmul.fp32_precision = kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("scored", [False, True])
def test_rows_beyond_the_counts_are_zeros_whatever_they_hold(dtype, scored):
    problem = random_problem(T=40, D=40, F=24, K=1, E=5, dtype=dtype).requiring_grad()
    counts = torch.tensor([5, 0, 11, 3, 9])
    with torch.no_grad():
        problem.x[28:] = float("nan")
    row_scores = torch.rand(40).requires_grad_() if scored else None
    leaves = [tensor for tensor in (problem.x, row_scores, problem.w1, problem.w3, problem.w2) if tensor is not None]
    out = grouped_experts(problem.x, counts, problem.w1, problem.w3, problem.w2, row_scores=row_scores, implementation="triton")
    actual = [out, *torch.autograd.grad(out, leaves, problem.dout)]
    doubles = [leaf.detach().nan_to_num(0.0).double().requires_grad_() for leaf in leaves]
    wanted = reference.grouped_experts(doubles[0], counts, *doubles[-3:])
    if scored:
        wanted = wanted * doubles[1][:, None]
    wanted = [wanted, *torch.autograd.grad(wanted, doubles, problem.dout.double())]
    assert max(relative_errors(actual, wanted)) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert torch.equal(out[28:], torch.zeros_like(out[28:]))
    assert torch.equal(actual[1][28:], torch.zeros_like(out[28:]))


@pytest.mark.parametrize("tma", [False, True])
def test_row_index_permutes_there_and_back_and_skips_what_names_no_row(tma):
    problem = random_problem(T=40, D=40, F=24, K=1, E=5).requiring_grad()
    counts = torch.tensor([5, 0, 11, 3, 9])
    row_index = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    row_index[[0, 7, 20]] = torch.tensor([-1, 40, -7])
    row_scores = torch.rand(40).requires_grad_()
    options = {"row_index": row_index, "row_scores": row_scores, "implementation": "triton", "tma": tma, "permute_first": tma}
    out = grouped_experts(problem.x, counts, problem.w1, problem.w3, problem.w2, **options)
    leaves = [problem.x, row_scores, problem.w1, problem.w3, problem.w2]
    actual = [out, *torch.autograd.grad(out, leaves, problem.dout)]

    # The same through topk ids: row r is a token with one expert.
    ids = torch.full((40, 1), -1)
    for position, expert in enumerate(torch.repeat_interleave(torch.arange(5), counts)):
        if 0 <= row_index[position] < 40:
            ids[row_index[position]] = expert
    wanted = replace(problem, ids=ids, scores=row_scores.detach()[:, None]).reference()
    wanted[2] = wanted[2][:, 0]
    assert max(relative_errors(actual, wanted)) < 1e-5


def test_counts_beyond_the_rows_are_cut_where_nobody_may_wait_for_the_device():
    from routepack.triton_kernels.routing import offsets_of_counts

    assert offsets_of_counts(torch.tensor([30, 30]), 40).tolist() == [0, 30, 40]


@pytest.mark.parametrize("sorted_rows", [False, True])
def test_gradients_added_to_accumulators(sorted_rows):
    problem = random_problem(T=40, D=40, F=24, K=1, E=5, dtype=torch.bfloat16).requiring_grad()
    sums = [torch.full_like(w, 0.5, dtype=torch.float32) for w in (problem.w1, problem.w3, problem.w2)]
    weights = (problem.w1, problem.w3, problem.w2)
    if sorted_rows:
        counts = torch.tensor([5, 0, 11, 3, 9])
        out = grouped_experts(problem.x, counts, *weights, implementation="triton", grad_accumulators=sums)
        out.backward(problem.dout)
        again = grouped_experts(problem.x, counts, *weights, implementation="triton")
    else:
        out = moe_experts(problem.x, problem.ids, problem.scores, *weights, implementation="triton", grad_accumulators=sums)
        out.backward(problem.dout)
        again = moe_experts(problem.x, problem.ids, problem.scores, *weights, implementation="triton")
    assert all(weight.grad is None for weight in weights)
    wanted = torch.autograd.grad(again, weights, problem.dout)
    for total, gradient in zip(sums, wanted, strict=True):
        assert relative_error(total - 0.5, gradient) < 1e-2


@pytest.mark.parametrize("trains", [False, True])
def test_h_is_stored_only_for_training(monkeypatch, trains):
    problem = random_problem(T=20, D=40, F=24, K=2, E=3)
    rows_of_h = []
    allocate = launch_forward.new_rows

    def spy(num_rows, width, like, parts=1):
        if parts == 2:
            rows_of_h.append(num_rows)
        return allocate(num_rows, width, like, parts)

    monkeypatch.setattr(launch_forward, "new_rows", spy)
    problem.x.requires_grad_(trains)
    moe_experts(problem.x, problem.ids, problem.scores, problem.w1, problem.w3, problem.w2, implementation="triton")
    assert rows_of_h == [40 if trains else 0]


def test_gradients_that_nobody_asks_for_are_not_computed(monkeypatch):
    problem = random_problem(T=20, D=40, F=24, K=2, E=3)

    def refuse(*_, **__):
        raise AssertionError("a kernel ran whose result nobody asked for")

    monkeypatch.setattr(launch_backward, "weight_gradient", refuse)
    problem.x.requires_grad_()
    arguments = (problem.x, problem.ids, problem.scores, problem.w1, problem.w3, problem.w2)
    moe_experts(*arguments, implementation="triton").sum().backward()
    monkeypatch.setattr(launch_backward, "input_gradient", refuse)
    problem.x.requires_grad_(False)
    problem.scores.requires_grad_()
    moe_experts(*arguments, implementation="triton").sum().backward()
