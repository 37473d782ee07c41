"""The kernels against the float64 reference: shapes, skew, dtypes, strides, variants. All memory starts as NaN."""

import pytest
import torch

from routepack.triton_kernels import moe_experts
from routepack.triton_kernels.testing import random_problem, relative_errors

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
POINTERS, TMA, TMA_SORTED = {"tma": False}, {"tma": True}, {"tma": True, "permute_first": True}

# (T, D, F, K, E), routing
SHAPES = [
    ((37, 64, 32, 2, 4), "uniform"),
    ((40, 48, 40, 2, 8), "empty"),
    ((70, 40, 24, 1, 5), "hot"),
    ((33, 40, 24, 3, 5), "hot"),
    ((19, 32, 16, 2, 4), "duplicate"),
    ((50, 72, 96, 2, 5), "skipped"),
    ((9, 32, 16, 2, 3), "none"),
    ((0, 32, 16, 2, 4), "uniform"),
    ((1, 32, 16, 1, 4), "uniform"),
    ((21, 24, 40, 4, 4), "uniform"),
    ((30, 64, 64, 1, 1), "uniform"),
    ((63, 32, 32, 1, 1), "uniform"),
    ((64, 32, 32, 1, 1), "uniform"),
    ((65, 32, 32, 1, 1), "uniform"),
    ((20, 200, 136, 2, 3), "uniform"),
    ((23, 7, 5, 2, 3), "uniform"),
    ((20, 13, 70, 2, 3), "uniform"),
]


def gradients(problem, **options):
    problem = problem.requiring_grad()
    out = moe_experts(
        problem.x, problem.ids, problem.scores, problem.w1, problem.w3, problem.w2, implementation="triton", **options
    )
    return [out.detach(), *torch.autograd.grad(out, problem.inputs, problem.dout)]


@pytest.mark.parametrize("options", [POINTERS, TMA, TMA_SORTED], ids=["pointers", "tma", "tma_sorted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("shape", "routing"), SHAPES, ids=lambda value: str(value).replace(" ", ""))
def test_output_and_gradients_are_the_references(shape, routing, dtype, options):
    T, D, F, K, E = shape
    problem = random_problem(T=T, D=D, F=F, K=K, E=E, routing=routing, dtype=dtype)
    errors = relative_errors(gradients(problem, **options), problem.reference())
    assert max(errors) < TOLERANCE[dtype], errors


def test_a_number_of_experts_that_is_no_power_of_two():
    problem = random_problem(T=150, D=32, F=16, K=2, E=257)
    errors = relative_errors(gradients(problem, **POINTERS), problem.reference())
    assert max(errors) < TOLERANCE[torch.float32], errors


@pytest.mark.slow
def test_many_tokens_over_many_experts():
    problem = random_problem(T=2048, D=256, F=128, K=8, E=64, dtype=torch.bfloat16)
    errors = relative_errors(gradients(problem), problem.reference())
    assert max(errors) < TOLERANCE[torch.bfloat16], errors


def test_half_precision():
    problem = random_problem(T=20, D=40, F=24, K=2, E=3, dtype=torch.float16)
    errors = relative_errors(gradients(problem), problem.reference())
    assert max(errors) < TOLERANCE[torch.float16], errors


@pytest.mark.parametrize("score_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_of_any_dtype_and_sign(score_dtype):
    problem = random_problem(T=20, D=40, F=24, K=2, E=3, score_dtype=score_dtype)
    problem.scores[:5] = 0.0
    problem.scores[5:9] *= -1
    actual = gradients(problem)
    assert actual[2].dtype == score_dtype
    errors = relative_errors(actual, problem.reference())
    assert errors[2] < (1e-2 if score_dtype == torch.bfloat16 else 1e-5)
    assert max(errors[:2] + errors[3:]) < 1e-5, errors


def test_recomputing_gate_and_up_gives_the_same_bits():
    problem = random_problem(T=50, D=72, F=40, K=3, E=5, dtype=torch.bfloat16)
    for options in (POINTERS, TMA, TMA_SORTED):
        saved, again = gradients(problem, **options), gradients(problem, recompute="gate_up", **options)
        assert all(torch.equal(one, other) for one, other in zip(saved, again, strict=True))


def test_the_same_input_gives_the_same_bits():
    problem = random_problem(T=50, D=72, F=40, K=3, E=5, dtype=torch.bfloat16)
    first, second = gradients(problem), gradients(problem)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (0, 1), (2, 3, 4), (1, 4)])
def test_gradients_that_are_asked_for_alone(wanted):
    problem = random_problem(T=20, D=40, F=24, K=2, E=3)
    expected = problem.reference()[1:]
    leaves = [tensor.detach().clone().requires_grad_(i in wanted) for i, tensor in enumerate(problem.inputs)]
    out = moe_experts(leaves[0], problem.ids, leaves[1], *leaves[2:], implementation="triton")
    out.backward(problem.dout)
    assert [leaf.grad is not None for leaf in leaves] == [i in wanted for i in range(5)]
    errors = relative_errors([leaves[i].grad for i in wanted], [expected[i] for i in wanted])
    assert max(errors) < 1e-5, errors


def test_an_expert_without_rows_has_gradients_of_zero():
    problem = random_problem(T=30, D=40, F=24, K=2, E=8, routing="empty")
    for gradient in gradients(problem)[3:]:
        assert torch.equal(gradient[::2], torch.zeros_like(gradient[::2]))
        assert gradient[1::2].abs().sum() > 0


def test_uninitialised_memory_is_poisoned():
    assert torch.empty(3).isnan().all()
    assert torch.zeros(2).new_empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(2)).isnan().all()
