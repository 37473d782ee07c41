"""What the layer refuses, by shapes, dtypes and devices alone: the message names the value, the limit and the remedy."""

import inspect
import typing

import pytest
import torch
import yaml
from torch.autograd import forward_ad

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
    ({"w2": W2.bfloat16()}, r"w2 is torch\.bfloat16 and x is torch\.float32: convert one, or run under torch\.autocast"),
    ({"w1": W1.to("meta")}, "w1 lies on meta and x on cpu"),
    ({"ids": IDS.float()}, "topk_ids is torch.float32; give integers"),
    ({"ids": IDS.bool()}, "topk_ids is torch.bool; give integers"),
    ({"ids": IDS[:4]}, r"topk_ids is \[4, 2\]; give \[T, K\] with T = 5"),
    ({"ids": IDS[:, 0]}, r"topk_ids is \[5\]; give \[T, K\]"),
    ({"ids": IDS.to("meta")}, "topk_ids lies on meta and x on cpu: move one"),
    ({"scores": SCORES[:, :1]}, r"topk_scores is \[5, 1\]; give one for each of topk_ids"),
    ({"scores": SCORES.long()}, "topk_scores is torch.int64; give floating point"),
    ({"activation": "gelu"}, "unexpected keyword argument 'activation'"),
    ({"recompute": "all"}, "recompute='all' is not known: choose one of 'none', 'gate_up'"),
    ({"implementation": "cuda"}, "implementation='cuda' is not known"),
    ({"implementation": "triton"}, "needs Triton's interpreter: set TRITON_INTERPRET=1"),
]


SUMS = (torch.zeros(3, 6, 8), torch.zeros(3, 6, 8), torch.zeros(3, 8, 6))
ACCUMULATORS = [
    (SUMS[:2], r"has 2 entries \(Tensor, Tensor\); give three tensors"),
    ((SUMS[0], None, SUMS[2]), "NoneType.*; give three tensors"),
    ((SUMS[2], SUMS[1], SUMS[0]), r"for w1 is \[3, 8, 6\]; it must be \[3, 6, 8\]"),
    ([total[:2] for total in SUMS], r"for w1 is \[2, 6, 8\]; it must be \[3, 6, 8\]"),
    ([total.long() for total in SUMS], "for w1 is torch.int64; give floating point"),
    ([total.to("meta") for total in SUMS], "for w1 lies on meta and w1 on cpu"),
    ((*SUMS[:2], torch.zeros(1).expand(3, 8, 6)), r"for w2 has strides \(0, 0, 0\), by which elements share memory"),
    ((SUMS[0], torch.zeros(60).as_strided((3, 6, 8), (8, 2, 1)), SUMS[2]), r"for w3 has strides \(8, 2, 1\)"),
    ((SUMS[0], SUMS[0], SUMS[2]), "names one tensor twice"),
]
LOCAL += [({"grad_accumulators": sums}, message) for sums, message in ACCUMULATORS]


@pytest.mark.parametrize(("changes", "message"), LOCAL, ids=lambda value: value if isinstance(value, str) else "")
def test_arguments_that_do_not_fit(changes, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = {"x": X, "ids": IDS, "scores": SCORES, "w1": W1, "w3": W1, "w2": W2} | changes
    tensors = [arguments.pop(name) for name in ("x", "ids", "scores", "w1", "w3", "w2")]
    with pytest.raises((ValueError, TypeError), match=message):
        moe_experts(*tensors, **arguments)


FLOAT8 = torch.float8_e4m3fn
WRONG_KINDS = [
    ({"x": X.bfloat16()}, r"w1 is torch\.float32 and x is torch\.bfloat16: convert one, or run under torch\.autocast"),
    ({"x": X.to(FLOAT8)}, r"x is torch\.float8_e4m3fn; give floating point: torch\.bfloat16, .*torch\.float64"),
    ({"x": X.to(torch.complex64)}, r"x is torch\.complex64; give floating point"),
    ({"x": X.to("meta")}, "lies on cpu and x on meta: move one"),
    ({"x": X.tolist()}, "x is a list; give a tensor"),
    ({"w3": W1.to(FLOAT8)}, r"w3 is torch\.float8_e4m3fn; give floating point"),
    ({"w2": W2.numpy()}, "w2 is a ndarray; give a tensor"),
    ({"ids": IDS.tolist()}, "topk_ids is a list; give a tensor"),
    ({"scores": SCORES.tolist()}, "topk_scores is a list; give a tensor"),
    ({"scores": SCORES.to("meta")}, "topk_scores lies on meta and x on cpu: move one"),
    ({"scores": SCORES.to(FLOAT8)}, r"topk_scores is torch\.float8_e4m3fn; give floating point"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_KINDS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("as_module", [False, True])
def test_dtypes_devices_and_lists_are_named(changes, message, as_module):
    arguments = {"x": X, "ids": IDS, "scores": SCORES, "w1": W1, "w3": W1, "w2": W2} | changes
    x, ids, scores, *weights = (arguments[name] for name in ("x", "ids", "scores", "w1", "w3", "w2"))
    experts = PermutedExperts(dim=8, hidden_dim=6, num_experts=3)
    experts._weights = lambda: weights
    with pytest.raises((ValueError, TypeError), match=message):
        experts(x, ids, scores) if as_module else moe_experts(x, ids, scores, *weights)


@pytest.mark.parametrize(
    ("x", "ids", "message"),
    [
        (
            X.float(),
            None,
            r"x is torch\.float32 and router\.weight is torch\.bfloat16: convert one, or run under torch\.autocast",
        ),
        (X.to(FLOAT8), None, r"x is torch\.float8_e4m3fn; give floating point"),
        (X.long(), None, r"x is torch\.int64; give floating point"),
        (X.to("meta"), None, r"x lies on meta and router\.weight on cpu: move one"),
        (X.tolist(), None, "x is a list; give a tensor"),
        (X.bfloat16(), IDS.tolist(), "topk_ids is a list; give a tensor"),
        (X.bfloat16(), IDS.to("meta"), "topk_ids lies on meta and x on cpu: move one"),
    ],
)
def test_the_whole_layer_names_dtypes_devices_and_lists(x, ids, message):
    moe = PermutedMoE(dim=8, hidden_dim=6, num_experts=3, top_k=2, dtype="bfloat16")
    with pytest.raises((ValueError, TypeError), match=message):
        moe(x, topk_ids=ids)


@pytest.mark.parametrize("layer", ["bfloat16", "float32"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_under_autocast_any_16_or_32_bits_go_together(layer, given):
    moe = PermutedMoE(dim=8, hidden_dim=6, num_experts=3, top_k=2, dtype=layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert moe(X.to(given)).dtype == torch.bfloat16
        assert moe.experts(X.to(given), IDS, SCORES).dtype == torch.bfloat16
        assert moe.experts.grouped(X.to(given), COUNTS).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.double(), r"torch\.float64.*run under torch\.autocast, which converts all but float64"),
        (X.to(FLOAT8), r"is torch\.float8_e4m3fn; give floating point"),
    ],
)
def test_autocast_converts_neither_float64_nor_float8(x, message):
    moe = PermutedMoE(dim=8, hidden_dim=6, num_experts=3, top_k=2)
    calls = [lambda: moe(x), lambda: moe.experts(x, IDS, SCORES), lambda: moe.experts.grouped(x, COUNTS)]
    for call in calls:
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=message):
            call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": X.bfloat16()}, r"w1 is torch\.float32 and rows is torch\.bfloat16: convert one"),
        ({"rows": X[None]}, r"rows has 3 dimensions; give \[T, D\]"),
        ({"counts": COUNTS.tolist()}, "counts is a list; give a tensor"),
        ({"counts": COUNTS.to("meta")}, "counts lies on meta and rows on cpu: move one"),
        ({"row_index": [0, 1]}, "row_index is a list; give a tensor"),
        ({"row_scores": [1.0]}, "row_scores is a list; give a tensor"),
        ({"row_scores": torch.ones(5, dtype=torch.long)}, r"row_scores is torch\.int64; give floating point"),
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
    for dtype in ("fp8", torch.float8_e4m3fn, torch.int32, 16):
        with pytest.raises(ValueError, match="is not computed in: choose one of bfloat16, float16, float32, float64"):
            PermutedMoE(dim=4, hidden_dim=4, num_experts=4, top_k=2, dtype=dtype)


@pytest.mark.parametrize("module", [PermutedMoE, PermutedExperts])
def test_modules_are_made_from_the_plain_values_of_a_config(module):
    options = yaml.safe_load("{dim: 64, hidden_dim: 32, num_experts: 8, top_k: 2, dtype: bfloat16, device: meta}")
    parameters = inspect.signature(module).parameters
    made = module(**{name: value for name, value in options.items() if name in parameters})
    assert {(weight.dtype, weight.device.type) for weight in made.parameters()} == {(torch.bfloat16, "meta")}
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert typing.get_type_hints(module.__init__).keys() - {"return"} == parameters.keys()


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"dim": 0}, ValueError, "dim=0 must be at least 1"),
        ({"hidden_dim": -2}, ValueError, "hidden_dim=-2 must be at least 1"),
        ({"num_experts": 0}, ValueError, "num_experts=0 must be at least 1"),
        ({"top_k": 0}, ValueError, "top_k=0 must be at least 1"),
        ({"top_k": 1.5}, TypeError, "top_k=1.5 is no whole number"),
        ({"top_k": True}, TypeError, "top_k=True is no whole number"),
        ({"dim": 4.0}, TypeError, "dim=4.0 is no whole number"),
    ],
)
def test_modules_refuse_sizes_that_are_none(sizes, error, message):
    with pytest.raises(error, match=message):
        PermutedMoE(**{"dim": 4, "hidden_dim": 4, "num_experts": 4, "top_k": 2} | sizes)


@pytest.mark.parametrize(
    ("x", "ids", "error", "message"),
    [
        (X, IDS.float(), TypeError, "topk_ids is torch.float32; give integers"),
        (X, IDS[:3], ValueError, r"topk_ids is \[3, 2\]; beside x \[5, 8\] give \[5, 'K'\]"),
        (X, IDS[:, :0], ValueError, r"topk_ids is \[5, 0\]; .* K of at least 1"),
        (X, IDS[:, 0], ValueError, r"topk_ids is \[5\]; beside x"),
        (X[None], IDS, ValueError, r"topk_ids is \[5, 2\]; beside x \[1, 5, 8\] give \[1, 5, 'K'\]"),
        (torch.ones(5, 9), IDS, ValueError, r"x is \[5, 9\]; give \[..., D\] with D = 8"),
        (torch.ones(()), None, ValueError, r"x is \[\]; give \[..., D\] with D = 8"),
    ],
)
def test_modules_refuse_tokens_and_routes_that_do_not_fit(x, ids, error, message):
    moe = PermutedMoE(dim=8, hidden_dim=6, num_experts=3, top_k=2)
    with pytest.raises(error, match=message):
        moe(x, topk_ids=ids)


def test_ids_of_all_experts_are_refused_where_only_some_are_here():
    class Sharded(PermutedExperts):
        """As under expert parallelism: the weights' local shard has a part of the experts."""

        def _weights(self):
            return [weight[2:] for weight in super()._weights()]

    experts = Sharded(dim=8, hidden_dim=6, num_experts=4)
    with pytest.raises(ValueError, match=r"2 of num_experts=4 experts are on this rank.*call \.grouped\(rows, counts\)"):
        experts(X, IDS, SCORES)
    assert experts.grouped(X, COUNTS[:2]).shape == X.shape


def test_second_derivatives_are_refused():
    x = X.clone().requires_grad_()
    first = torch.autograd.grad(moe_experts(x, IDS, SCORES, W1, W1, W2).sum(), x, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="Second derivatives of the MoE layer are not supported"):
        first.sum().backward()


# What torch itself loads for forward mode.
FORWARD_MODE = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@FORWARD_MODE
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian, torch.func.jacfwd, torch.func.jacrev])
def test_transforms_that_differentiate_are_refused(transform):
    with pytest.raises(NotImplementedError, match=r"not under torch\.func"):
        transform(lambda x: moe_experts(x, IDS, SCORES, W1, W1, W2).sum())(X)


@FORWARD_MODE
def test_forward_mode_derivatives_are_refused():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, X)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            moe_experts(x, IDS, SCORES, W1, W1, W2)
