"""Components on one process, without a trainer."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from routepack.core.errors import ConfigError
from routepack.torchtitan.model import models, overrides
from routepack.torchtitan.model.models import TinyQwen3MoE, build_local_model

TINY = TinyQwen3MoE(dim=32, moe_hidden_dim=32, num_layers=2, num_experts=8)


@pytest.fixture(scope="module")
def local():
    return build_local_model(TINY, seed=3)


def forward(local, tokens, positions):
    return local(tokens, positions=positions, attention_masks=local.get_attention_masks(positions))


def documents(lengths):
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, TINY.vocab_size, (1, sum(lengths))))
    return tokens, torch.cat([torch.arange(length) for length in lengths])[None]


@given(st.lists(st.lists(st.integers(-1, 9), min_size=3, max_size=3), min_size=1, max_size=20))
def test_rows_are_replayed_only_when_whole_known_and_distinct(rows):
    native = torch.arange(3).expand(1, len(rows), 3)
    routed = overrides.replayed_or_native(torch.tensor([rows]), native, num_experts=8)[0].tolist()
    for row, got in zip(rows, routed, strict=True):
        usable = len(set(row)) == 3 and all(0 <= expert < 8 for expert in row)
        assert got == (row if usable else [0, 1, 2])


def test_replayed_gates_are_the_live_scores_of_the_replayed_experts(local):
    router = overrides.replay_routers(local)[0]
    x = torch.randn(1, 2, TINY.dim)
    scores = F.softmax(x[0] @ router.gate.weight.T, dim=-1)
    router.replayed_expert_ids_BLK = torch.tensor([[[5, 1], [0, 7]]])
    gates, ids, _ = router(x)
    router.replayed_expert_ids_BLK = None
    expected = torch.stack([scores[0, [5, 1]] / scores[0, [5, 1]].sum(), scores[1, [0, 7]] / scores[1, [0, 7]].sum()])
    assert ids[0].tolist() == [[5, 1], [0, 7]]
    torch.testing.assert_close(gates[0], expected)


def test_documents_do_not_see_each_other(local):
    tokens, positions = documents([7, 12])
    together = forward(local, tokens, positions)
    apart = torch.cat([forward(local, tokens[:, :7], positions[:, :7]), forward(local, tokens[:, 7:], positions[:, 7:])], dim=1)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)


def test_routes_are_recorded_in_layer_order(local):
    with overrides.recorded_routes(local):
        forward(local, *documents([5, 4]))
        routes = overrides.routes_of(local)
    assert routes.shape == (1, 9, 2, 2)
    assert not torch.equal(routes[:, :, 0], routes[:, :, 1])


def test_routes_are_not_kept_after_recording(local):
    with overrides.recorded_routes(local):
        forward(local, *documents([5]))
    with pytest.raises(ConfigError, match="no route was recorded"):
        overrides.routes_of(local)


def test_placed_experts_give_the_same_output_wherever_they_are(local):
    tokens, positions = documents([9, 6])
    expected = forward(local, tokens, positions)
    moved = build_local_model(TINY, seed=3)
    slots = torch.from_numpy(np.random.default_rng(1).permutation(TINY.num_experts))
    with torch.no_grad():
        for layer in overrides.placed_layers(moved):
            layer.set_placement(slots)
            for weight in layer.inner_experts.parameters():
                weight.copy_(weight[slots])
    torch.testing.assert_close(forward(moved, tokens, positions), expected, atol=1e-6, rtol=0)


def test_loop_experts_give_experts_without_rows_a_zero_gradient(local):
    experts = overrides.placed_layers(local)[0].inner_experts
    rows = torch.randn(4, TINY.dim)
    experts(rows, torch.tensor([0, 3, 0, 0, 1, 0, 0, 0])).sum().backward()
    norms = experts.w1_EFD.grad.flatten(1).norm(dim=1)
    assert (norms > 0).tolist() == [False, True, False, False, True, False, False, False]


def test_loop_experts_compute_swiglu(local):
    experts = overrides.placed_layers(local)[0].inner_experts
    rows = torch.randn(5, TINY.dim)
    out = experts(rows, torch.tensor([2, 0, 3, 0, 0, 0, 0, 0]))
    for expert, part in ((0, slice(0, 2)), (2, slice(2, 5))):
        w1, w2, w3 = (weight[expert] for weight in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD))
        torch.testing.assert_close(out[part], (F.silu(rows[part] @ w1.T) * (rows[part] @ w3.T)) @ w2.T)


@pytest.mark.parametrize("path", ["no.such.module.Experts", "torch.nn.Linear", "routepack.torchtitan.model.overrides.Nothing"])
def test_experts_that_are_no_experts_are_refused(path):
    with pytest.raises(ConfigError, match="experts="):
        overrides.experts_class(path)


def test_an_unsharded_copy_takes_the_trainers_state():
    one, other = build_local_model(TINY, seed=1), build_local_model(TINY, seed=2)
    models.load_full_state(other, {name: parameter.detach() for name, parameter in one.named_parameters()})
    tokens, positions = documents([6])
    assert torch.equal(forward(one, tokens, positions), forward(other, tokens, positions))


def test_the_same_seed_gives_the_same_model():
    first, second = (build_local_model(TINY, seed=5).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("norm.weight"), "lacks 1 parameters"),
        (lambda state: state.update(more=torch.zeros(1)), "no parameter of the model"),
        (lambda state: state.update({"norm.weight": torch.zeros(3)}), "has shape"),
    ],
)
def test_a_state_of_another_model_is_refused(local, spoil, message):
    state = {name: parameter.detach() for name, parameter in local.named_parameters()}
    spoil(state)
    with pytest.raises(ConfigError, match=message):
        models.load_full_state(local, state)


@pytest.mark.parametrize("changes", [{"top_k": 9}, {"num_kv_heads": 3}, {"head_dim": 7}, {"num_layers": 0}])
def test_models_that_cannot_be_are_refused(changes):
    with pytest.raises(ConfigError, match=f"model.{next(iter(changes))}"):
        TinyQwen3MoE(**{"num_experts": 8, **changes})


def test_unknown_registered_models_are_refused():
    with pytest.raises(ConfigError, match="no such mixture of experts"):
        models.RegisteredModel(name="qwen3", flavor="none").model_spec()


def test_dense_registered_models_are_refused():
    with pytest.raises(ConfigError, match=r"model\.flavor='0\.6B'"):
        models.RegisteredModel(name="qwen3", flavor="0.6B").model_spec()


def test_a_registered_model_is_made_fit_for_replay():
    spec = models.RegisteredModel(name="qwen3", flavor="30B-A3B").model_spec()
    assert models.num_experts_of(spec) == 128
    assert {layer.moe.load_balance_coeff for layer in spec.model.layers} == {None}
