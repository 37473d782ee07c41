"""The loop over the experts, the routing and the functions around them, on the CPU without Triton."""

import logging
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routepack.triton_kernels import PermutedMoE, grouped_experts, moe_experts, reference, torch_operators
from routepack.triton_kernels.routing import max_tiles, offsets_of_counts, route
from routepack.triton_kernels.testing import ROUTINGS, random_problem, relative_errors

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
SHAPES = [(37, 64, 32, 2, 4), (0, 8, 8, 2, 4), (1, 8, 8, 1, 4), (20, 13, 7, 4, 4), (30, 16, 16, 1, 1), (90, 16, 8, 3, 257)]


def outputs(problem, **options):
    problem = problem.requiring_grad()
    out = moe_experts(problem.x, problem.ids, problem.scores, problem.w1, problem.w3, problem.w2, **options)
    return [out.detach(), *torch.autograd.grad(out, problem.inputs, problem.dout)]


@pytest.mark.parametrize("recompute", ["none", "gate_up"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_are_the_references(shape, routing, dtype, recompute):
    T, D, F, K, E = shape
    scores = torch.float64 if dtype == torch.float64 else torch.float32
    problem = random_problem(T=T, D=D, F=F, K=K, E=E, routing=routing, dtype=dtype, score_dtype=scores)
    errors = relative_errors(outputs(problem, recompute=recompute), problem.reference())
    assert max(errors) < TOLERANCE[dtype], errors


def test_gradients_by_finite_differences():
    problem = random_problem(T=5, D=4, F=3, K=2, E=3, routing="skipped", dtype=torch.float64).requiring_grad()
    scores = problem.scores.detach().double().requires_grad_()

    def layer(x, scores, w1, w3, w2):
        return moe_experts(x, problem.ids, scores, w1, w3, w2)

    assert torch.autograd.gradcheck(layer, (problem.x, scores, problem.w1, problem.w3, problem.w2))


def test_gradients_by_finite_differences_after_a_dispatch():
    problem = random_problem(T=6, D=4, F=3, K=1, E=3, dtype=torch.float64).requiring_grad()
    scores = torch.rand(6, dtype=torch.float64).requires_grad_()
    counts, row_index = torch.tensor([2, 0, 3]), torch.tensor([4, 0, -1, 5, 2, 1])

    def layer(rows, scores, w1, w3, w2):
        return grouped_experts(rows, counts, w1, w3, w2, row_index=row_index, row_scores=scores)

    assert torch.autograd.gradcheck(layer, (problem.x, scores, problem.w1, problem.w3, problem.w2))


def test_rows_beyond_the_counts_are_zeros_whatever_they_hold():
    problem = random_problem(T=9, D=8, F=6, K=1, E=3).requiring_grad()
    with torch.no_grad():
        problem.x[5:] = float("nan")
    counts = torch.tensor([2, 0, 3])
    out = grouped_experts(problem.x, counts, problem.w1, problem.w3, problem.w2)
    dx, *dws = torch.autograd.grad(out, [problem.x, problem.w1, problem.w3, problem.w2], problem.dout)
    assert torch.equal(out[5:], torch.zeros(4, 8))
    assert torch.equal(dx[5:], torch.zeros(4, 8))
    assert all(torch.isfinite(dw).all() for dw in dws)


def test_row_index_permutes_there_and_back():
    problem = random_problem(T=9, D=8, F=6, K=1, E=3)
    counts, row_index = torch.tensor([2, 0, 4]), torch.randperm(9, generator=torch.Generator().manual_seed(3))
    weights = (problem.w1, problem.w3, problem.w2)
    sorted_out = reference.grouped_experts(problem.x[row_index], counts, *weights)
    wanted = torch.zeros_like(problem.x)
    wanted[row_index] = sorted_out
    torch.testing.assert_close(grouped_experts(problem.x, counts, *weights, row_index=row_index), wanted)


def test_gradients_are_added_to_accumulators():
    problem = random_problem(T=9, D=8, F=6, K=2, E=3).requiring_grad()
    weights = (problem.w1, problem.w3, problem.w2)
    sums = [torch.ones_like(w) for w in weights]
    out = moe_experts(problem.x, problem.ids, problem.scores, *weights, grad_accumulators=sums)
    out.backward(problem.dout)
    assert all(w.grad is None for w in weights)
    assert max(relative_errors([total - 1 for total in sums], problem.reference()[3:])) < 1e-5


def test_autocast_computes_in_its_dtype():
    problem = random_problem(T=9, D=8, F=6, K=2, E=3).requiring_grad()
    weights = (problem.w1, problem.w3, problem.w2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = moe_experts(problem.x, problem.ids, problem.scores, *weights)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert problem.w1.grad.dtype == torch.float32


def test_autocast_leaves_float64_as_it_is():
    problem = random_problem(T=9, D=8, F=6, K=2, E=3, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = moe_experts(problem.x, problem.ids, problem.scores, problem.w1, problem.w3, problem.w2)
    assert relative_errors([out], problem.reference()[:1])[0] < 1e-12


def test_nothing_is_added_to_the_accumulator_of_a_weight_without_a_gradient():
    problem = random_problem(T=9, D=8, F=6, K=2, E=3).requiring_grad()
    problem.w3.requires_grad_(False)
    weights = (problem.w1, problem.w3, problem.w2)
    sums = [torch.ones_like(w) for w in weights]
    moe_experts(problem.x, problem.ids, problem.scores, *weights, grad_accumulators=sums).backward(problem.dout)
    assert torch.equal(sums[1], torch.ones_like(sums[1]))
    wanted = problem.reference()
    assert max(relative_errors([sums[0] - 1, sums[2] - 1], [wanted[3], wanted[5]])) < 1e-5


def test_accumulators_get_sums_that_were_not_rounded_to_16_bits():
    problem = random_problem(T=60, D=8, F=6, K=2, E=3, dtype=torch.bfloat16).requiring_grad()
    weights = (problem.w1, problem.w3, problem.w2)
    sums = [torch.zeros(w.shape) for w in weights]
    moe_experts(problem.x, problem.ids, problem.scores, *weights, grad_accumulators=sums).backward(problem.dout)
    assert not any(torch.equal(total, total.bfloat16().float()) for total in sums)


@pytest.mark.parametrize("named_by", ["row_index", "topk_ids"])
def test_a_slot_without_an_expert_may_have_a_score_of_nan(named_by):
    problem = random_problem(T=6, D=8, F=6, K=1, E=3).requiring_grad()
    scores = torch.tensor([float("nan"), 1.0, 0.5, 0.25, 2.0, 1.0]).requires_grad_()
    weights = (problem.w1, problem.w3, problem.w2)
    if named_by == "row_index":
        out = grouped_experts(
            problem.x, torch.tensor([2, 1, 1]), *weights, row_index=torch.tensor([-1, 3, 4, 5]), row_scores=scores
        )
    else:
        out = moe_experts(problem.x, torch.tensor([[-1], [0], [1], [2], [0], [1]]), scores[:, None], *weights)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(leaf.grad).all() for leaf in (problem.x, scores, *weights))


def test_a_padding_token_of_nan_without_experts_is_zeros():
    moe = PermutedMoE(dim=8, hidden_dim=6, num_experts=4, top_k=2)
    x = torch.randn(3, 8)
    x[2] = float("nan")
    x.requires_grad_()
    out = moe(x, topk_ids=torch.tensor([[0, 1], [2, 3], [-1, -1]]))
    assert torch.equal(out[2], torch.zeros(8))
    assert torch.isfinite(torch.autograd.grad(out.sum(), moe.experts.w1_EFD)[0]).all()


def test_no_rows_but_an_index_of_none():
    problem = random_problem(T=0, D=8, F=6, K=1, E=2).requiring_grad()
    weights = (problem.w1, problem.w3, problem.w2)
    out = grouped_experts(problem.x, torch.tensor([1, 1]), *weights, row_index=torch.tensor([-1, -1]))
    out.sum().backward()
    assert out.shape == (0, 8)
    assert all(torch.equal(w.grad, torch.zeros_like(w)) for w in weights)


INTEGERS = [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_ids_counts_and_indices_of_any_integer_type(dtype):
    E = 128
    ids = torch.randint(0, E, (40, 2), generator=torch.Generator().manual_seed(0))
    ids[::3, 1] = -1 if dtype.is_signed else 200
    problem = random_problem(T=300, D=8, F=6, K=1, E=E)
    assert all(torch.equal(a, b) for a, b in zip(route(ids.to(dtype), E), route(ids, E), strict=True))
    weights = (problem.w1, problem.w3, problem.w2)
    counts, index = torch.ones(E, dtype=torch.long), torch.arange(127, -1, -1)
    wanted = grouped_experts(problem.x, counts, *weights, row_index=index)
    assert torch.equal(grouped_experts(problem.x, counts.to(dtype), *weights, row_index=index.to(dtype)), wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_the_module_replays_ids_of_any_integer_type(dtype):
    moe = PermutedMoE(dim=8, hidden_dim=6, num_experts=4, top_k=2)
    x = torch.randn(3, 8)
    wanted = moe(x)
    assert torch.equal(moe(x, topk_ids=moe.last_topk_ids.to(dtype)), wanted)


@given(
    ids=st.integers(1, 6).flatmap(
        lambda K: st.lists(st.lists(st.integers(-2, 9), min_size=K, max_size=K), min_size=1, max_size=40)
    ),
    num_experts=st.integers(1, 9),
)
def test_routing_sorts_slots_by_expert_and_drops_none(ids, num_experts):
    order, inverse, offsets = route(torch.tensor(ids), num_experts)
    flat = [expert if 0 <= expert < num_experts else num_experts for row in ids for expert in row]
    wanted = sorted(range(len(flat)), key=lambda slot: (flat[slot], slot))
    assert order.tolist() == wanted
    assert [order[row].item() for row in inverse] == list(range(len(flat)))
    assert offsets.tolist() == [sum(expert < bound for expert in flat) for bound in range(num_experts + 1)]


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=20),
    spare=st.integers(0, 50),
    tile_rows=st.sampled_from([1, 16, 64, 128]),
)
def test_no_distribution_of_rows_needs_more_tiles_than_the_grid_has(counts, spare, tile_rows):
    num_tiles = sum(-(-count // tile_rows) for count in counts)
    assert num_tiles <= max_tiles(sum(counts) + spare, len(counts), tile_rows)


def test_the_bound_on_tiles_is_reached():
    assert max_tiles(10, 4, 8) == 4
    assert sum(-(-count // 8) for count in (7, 1, 1, 1)) == 4


def test_many_experts_need_a_wider_sort_key():
    ids = torch.tensor([[40_000, 3], [-1, 39_999]])
    order, _, offsets = route(ids, 40_001)
    assert order.tolist() == [1, 3, 0, 2]
    assert offsets[[3, 4, 39_999, 40_000, 40_001]].tolist() == [0, 1, 1, 2, 3]


def test_counts_beyond_the_rows_are_cut():
    assert offsets_of_counts(torch.tensor([30, 30]), 40).tolist() == [0, 30, 40]


def test_counts_below_zero_are_zero():
    assert offsets_of_counts(torch.tensor([-5, 10, 2]), 8).tolist() == [0, 0, 8, 8]
    assert offsets_of_counts(torch.tensor([3, -4, 2]), 8).tolist() == [0, 3, 3, 5]


def test_one_log_line_says_what_runs(caplog):
    torch_operators._announce.cache_clear()
    problem = random_problem(T=3, D=4, F=4, K=1, E=2)
    with caplog.at_level(logging.INFO, logger="routepack.triton_kernels"):
        outputs(problem)
        outputs(problem)
    assert caplog.messages == ["MoE experts on cpu: a loop over the experts in plain torch."]


def test_importing_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, routepack.triton_kernels as moe\n"
        "layer = moe.PermutedMoE(dim=4, hidden_dim=4, num_experts=2, top_k=1)\n"
        "layer(torch.ones(3, 4)).sum().backward()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
    assert done.returncode == 0, done.stderr


def _environment():
    import os
    from pathlib import Path

    import routepack

    return os.environ | {"PYTHONPATH": str(Path(routepack.__file__).parents[1])}
