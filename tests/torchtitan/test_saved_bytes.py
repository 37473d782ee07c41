"""What a layer keeps for its backward pass beside TorchTitan's own experts, counted by hooks at Qwen3-30B-A3B's shape."""

from math import prod

import pytest
import torch

from routepack.torchtitan.model import overrides
from routepack.torchtitan.model.experts import RecomputingTritonExperts, TritonExperts
from routepack.torchtitan.model.models import RegisteredModel

T, D, F, K, E = 64, 2_048, 768, 8, 128


def routed_experts(experts):
    """The layer of TorchTitan's Qwen3-30B-A3B, its experts as given or its own, bfloat16, without values of its weights."""
    spec = RegisteredModel(name="qwen3", flavor="30B-A3B").model_spec()
    config = spec.model.layers[0].moe.routed_experts
    assert type(config) is overrides.RoutedExperts.Config
    if experts is not None:
        config = overrides.derive(
            config, overrides.PlacedRoutedExperts.Config, inner_experts=overrides.derive(config.inner_experts, experts.Config)
        )
    with torch.device("meta"):
        layer = config.build()
    return layer.to(torch.bfloat16).to_empty(device="cpu")


def kept_bytes_per_token(layer):
    """Of all distinct storages that autograd keeps, the parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = max(storage.nbytes(), kept.get(storage.data_ptr(), 0))
        return tensor

    x = torch.zeros(1, T, D, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.full((1, T, K), 1 / K, requires_grad=True)
    ids = (torch.arange(T * K) % E).view(1, T, K)
    counts = torch.full((E,), T * K // E)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer(x, scores, ids, counts)
    assert out.shape == x.shape
    return sum(kept.values()) / T


@pytest.fixture(scope="module")
def stock():
    return kept_bytes_per_token(routed_experts(None))


def test_the_shape_is_the_models():
    inner = routed_experts(None).inner_experts
    assert [prod(parameter.shape) for parameter in inner.parameters()] == [E * F * D] * 3


@pytest.mark.parametrize(
    ("experts", "bytes_per_token", "times_less"),
    [(TritonExperts, 2 * D + 4 * K * F, 4), (RecomputingTritonExperts, 2 * D, 20)],
)
def test_the_layer_keeps_x_and_both_projections_or_x_alone(stock, experts, bytes_per_token, times_less):
    kept = kept_bytes_per_token(routed_experts(experts))
    # Beside them the routing: an order, its inverse and the scores, 4 bytes each a slot; and the experts' offsets.
    assert bytes_per_token <= kept <= bytes_per_token + 3 * 4 * K + 4 * (E + 1) / T
    assert stock / kept >= times_less
