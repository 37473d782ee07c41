"""Defects that users met in other MoE kernels, each as it was met; the name says where.

Cases that only a device's own arithmetic shows (addresses beyond 2^31) are in ``interpreted/test_large_offsets.py``.
"""

import pytest
import torch

from routepack.triton_kernels import PermutedMoE, grouped_experts, moe_experts, reference
from routepack.triton_kernels.routing import route
from routepack.triton_kernels.testing import random_problem, relative_errors


def grouped(counts, *, num_rows=None, dim=8, hidden_dim=4):
    """Output and gradients of rows with *counts*, with NaN in the rows beyond."""
    total = sum(counts)
    problem = random_problem(T=num_rows or total, D=dim, F=hidden_dim, K=1, E=len(counts)).requiring_grad()
    with torch.no_grad():
        problem.x[total:] = float("nan")
    counts_E = torch.tensor(counts)
    weights = (problem.w1, problem.w3, problem.w2)
    out = grouped_experts(problem.x, counts_E, *weights)
    wanted = reference.grouped_experts(problem.x[:total], counts_E, *weights)
    leaves = (problem.x, *weights)
    actual = [out.detach(), *torch.autograd.grad(out, leaves, problem.dout)]
    expected = [wanted.detach(), *torch.autograd.grad(wanted, leaves, problem.dout[:total])]
    return actual, expected, total


def test_verl_4986_repeated_ids_are_rows_each():
    order, _, offsets = route(torch.tensor([[3, 3, 5]]), 8)
    assert offsets.diff().tolist() == [0, 0, 0, 2, 0, 1, 0, 0]
    assert order.tolist() == [0, 1, 2]


def test_verl_4986_repeated_ids_add_up():
    problem = random_problem(T=1, D=8, F=4, K=3, E=8)
    weights = (problem.w1, problem.w3, problem.w2)
    twice = moe_experts(problem.x, torch.tensor([[3, 3, 5]]), torch.tensor([[0.5, 0.25, 1.0]]), *weights)
    once = moe_experts(problem.x, torch.tensor([[3, 5]]), torch.tensor([[0.75, 1.0]]), *weights)
    torch.testing.assert_close(twice, once)


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([162, 0, 2577, 446, 0, 83], id="pytorch_172439"),
        pytest.param([0, 0, 7], id="grouped_gemm_36"),
        pytest.param([0, 8, 1], id="torchtitan_1166"),
        pytest.param([44, 1, 0], id="torchtitan_2262_no_alignment_is_asked_of_bf16_rows"),
        pytest.param([0] * 250 + [3, 0, 0, 2, 0, 1], id="MSLK_158_many_empty_experts"),
    ],
)
def test_experts_without_rows_get_gradients_of_zero(counts):
    actual, expected, _ = grouped(counts)
    assert max(relative_errors(actual, expected)) < 1e-5
    for gradient in actual[2:]:
        for expert, count in enumerate(counts):
            assert count > 0 or gradient[expert].abs().max() == 0


@pytest.mark.parametrize("case", ["pytorch_154557", "torchtitan_1237"])
def test_rows_beyond_the_last_expert_are_zeros(case):
    actual, expected, total = grouped([3, 0, 2], num_rows=9)
    assert torch.equal(actual[0][total:], torch.zeros(9 - total, 8))
    assert torch.equal(actual[1][total:], torch.zeros(9 - total, 8))
    assert max(relative_errors([actual[0][:total], *actual[2:]], [expected[0], *expected[2:]])) < 1e-5


def test_DeepGEMM_38_a_label_of_minus_one_is_a_row_without_an_expert():
    problem = random_problem(T=6, D=8, F=4, K=2, E=3).requiring_grad()
    ids = problem.ids.clone()
    ids[2, 1], ids[4] = -1, -1
    with torch.no_grad():
        problem.x[4] = float("inf")
    out = moe_experts(problem.x, ids, problem.scores, problem.w1, problem.w3, problem.w2)
    out.sum().backward()
    assert torch.equal(out[4], torch.zeros(8))
    assert problem.scores.grad[2, 1] == 0
    assert torch.equal(problem.x.grad[4], torch.zeros(8))
    assert all(torch.isfinite(leaf.grad).all() for leaf in problem.inputs)


def test_aiter_4530_a_row_of_nan_stays_in_range_and_to_itself():
    moe = PermutedMoE(dim=8, hidden_dim=4, num_experts=4, top_k=2)
    x = torch.randn(5, 8)
    clean = moe(x)
    x[1] = float("nan")
    out = moe(x)
    assert ((moe.last_topk_ids >= 0) & (moe.last_topk_ids < 4)).all()
    # The NaN row may go to other experts than before, and the height of a product may change its last bits.
    torch.testing.assert_close(out[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


def test_torchtitan_3436_counts_are_integers_and_exact_beyond_float32():
    ids = torch.full((2**24 + 1, 1), 1, dtype=torch.int32)
    assert route(ids, 2)[2].tolist() == [0, 0, 2**24 + 1]
