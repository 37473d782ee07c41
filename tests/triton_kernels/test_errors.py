"""What the layer refuses, by shapes, dtypes and devices alone: the message names the value, the limit and the remedy."""

import pytest
import torch

from routepack.triton_kernels import PermutedExperts, PermutedMoE, grouped_experts, moe_experts

X, IDS, SCORES = torch.ones(5, 8), torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2)
W1, W2 = torch.ones(3, 6, 8), torch.ones(3, 8, 6)
COUNTS = torch.tensor([2, 1, 2])

LOCAL = [
    ({"x": X[None]}, r"x has 3 dimensions; give \[T, D\]"),
    ({"x": torch.ones(5, 9)}, r"x is \[5, 9\], but w1 .* takes rows of D = 8"),
    ({"x": X.long()}, "x is torch.int64; give floating point"),
    ({"w1": W1[0]}, "w1 has 2 dimensions"),
    ({"w1": torch.ones(0, 6, 8), "w3": torch.ones(0, 6, 8), "w2": torch.ones(0, 8, 6)}, "E, F and D must be at least 1"),
    ({"w3": W2}, r"w3 is \[3, 8, 6\]; beside w1 .* it must be \[3, 6, 8\]"),
    ({"w2": W1}, r"w2 is \[3, 6, 8\]; beside w1 .* it must be \[3, 8, 6\]"),
    ({"w2": W2.bfloat16()}, "w2 is torch.bfloat16 and x is torch.float32: convert one, or run under torch.autocast"),
    ({"w1": W1.to("meta")}, "w1 lies on meta and x on cpu"),
    ({"ids": IDS.float()}, "topk_ids is torch.float32; give integers"),
    ({"ids": IDS.bool()}, "topk_ids is torch.bool; give integers"),
    ({"ids": IDS[:4]}, r"topk_ids is \[4, 2\]; give \[T, K\] with T = 5"),
    ({"ids": IDS[:, 0]}, r"topk_ids is \[5\]; give \[T, K\]"),
    ({"ids": IDS.to("meta")}, "topk_ids lies on meta and x on cpu: move one"),
    ({"scores": SCORES[:, :1]}, r"topk_scores is \[5, 1\]; give one for each of topk_ids"),
    ({"scores": SCORES.long()}, "topk_scores is torch.int64; give floating point"),
    ({"activation": "gelu"}, "activation='gelu' is not known: choose one of 'swiglu'"),
    ({"recompute": "all"}, "recompute='all' is not known: choose one of 'none', 'gate_up'"),
    ({"implementation": "cuda"}, "implementation='cuda' is not known"),
    ({"implementation": "triton"}, "needs Triton's interpreter: set TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize(("changes", "message"), LOCAL, ids=lambda value: value if isinstance(value, str) else "")
def test_arguments_that_do_not_fit(changes, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = {"x": X, "ids": IDS, "scores": SCORES, "w1": W1, "w3": W1, "w2": W2} | changes
    tensors = [arguments.pop(name) for name in ("x", "ids", "scores", "w1", "w3", "w2")]
    with pytest.raises((ValueError, TypeError), match=message):
        moe_experts(*tensors, **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": COUNTS[:2]}, "counts is .*; give one for each of the E = 3 experts"),
        ({"counts": COUNTS.float()}, "counts is torch.float32; give integers"),
        ({"counts": torch.tensor([2, 1, 3])}, "counts add up to 6, but there are 5 rows"),
        ({"counts": torch.tensor([2, -1, 3])}, "counts has -1: a count is at least 0"),
        ({"row_index": IDS}, "row_index is .*; give one dimension"),
        ({"row_scores": SCORES}, "row_scores is .*; give one for each of the 5 rows"),
    ],
)
def test_arguments_of_a_dispatch_that_do_not_fit(changes, message):
    arguments = {"rows": X, "counts": COUNTS, "w1": W1, "w3": W1, "w2": W2} | changes
    with pytest.raises((ValueError, TypeError), match=message):
        grouped_experts(**arguments)


def test_float64_is_not_for_triton(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    doubles = [tensor.double() for tensor in (W1, W1, W2)]
    with pytest.raises(TypeError, match=r'not torch\.float64: use "eager"'):
        moe_experts(X.double(), IDS, SCORES, *doubles, implementation="triton")


def test_modules_refuse_their_options_when_made():
    with pytest.raises(ValueError, match="top_k=5 must be between 1 and num_experts=4"):
        PermutedMoE(dim=4, hidden_dim=4, num_experts=4, top_k=5)
    with pytest.raises(ValueError, match="recompute='some' is not known"):
        PermutedExperts(dim=4, hidden_dim=4, num_experts=4, recompute="some")
