"""The Triton experts in TorchTitan: the stock experts' losses, parameters and sharding, on one rank and over an EP group."""

import numpy as np
import pytest
import torch

from routepack.torchtitan.model import overrides
from routepack.torchtitan.model.experts import TritonExperts
from routepack.torchtitan.model.models import TinyQwen3MoE, build_local_model

PATH = "routepack.torchtitan.model.experts."
ROUNDING = 2e-6
"""Of a loss near 4, in float32, after ten steps."""


def losses(results, key):
    return np.array(results[0][key]["losses"])


def test_losses_on_one_rank_are_the_stock_experts(alone):
    stock = losses(alone, "stock experts")
    np.testing.assert_allclose(losses(alone, "trains TritonExperts ep=1 first_fit"), stock, rtol=0, atol=ROUNDING)


def test_losses_over_an_ep_group_are_those_of_one_rank_whatever_the_placement(alone, pair):
    one = losses(alone, "trains TritonExperts ep=1 first_fit")
    for plans in ("planner", "shuffled"):
        np.testing.assert_allclose(losses(pair, f"trains TritonExperts ep=2 {plans}"), one, rtol=0, atol=ROUNDING)
        assert pair[0][f"trains TritonExperts ep=2 {plans}"]["experts_moved"] > 0


def test_recomputation_changes_no_bit(alone):
    kept = losses(alone, "trains TritonExperts ep=1 first_fit")
    assert np.array_equal(losses(alone, "trains RecomputingTritonExperts ep=1 first_fit"), kept)


@pytest.mark.parametrize(
    ("ranks", "run"), [pytest.param("slow_alone", "ep=1 first_fit", marks=pytest.mark.slow), ("pair", "ep=2 planner")]
)
def test_the_triton_path_gives_the_same_under_the_interpreter(request, ranks, run):
    results = request.getfixturevalue(ranks)
    interpreted = losses(results, f"trains InterpretedExperts {run}")
    np.testing.assert_allclose(
        interpreted, losses(results, f"trains TritonExperts {run}")[: len(interpreted)], rtol=0, atol=1e-6
    )


def test_an_error_in_the_scores_would_show_in_the_losses(alone):
    wrong = losses(alone, "trains ScorelessExperts ep=1 first_fit")
    assert np.abs(wrong - losses(alone, "stock experts")).max() > 1e3 * ROUNDING


def test_parameters_keep_their_names_shapes_and_sharding(pair):
    assert pair[0]["keeps Triton"] == pair[0]["keeps stock"]
    assert set(pair[0]["keeps Triton"]) == {"w1_EFD", "w2_EDF", "w3_EFD"}


def test_the_override_of_torchtitans_own_trainer_builds_the_same_experts():
    class Stock(TinyQwen3MoE):
        def override_imports(self):
            return [f"{PATH}triton_experts", *[entry for entry in super().override_imports() if "placed" not in entry[0]]]

    small = {"dim": 32, "moe_hidden_dim": 32, "num_layers": 1, "num_experts": 4}
    model = build_local_model(Stock(**small), seed=1)
    assert isinstance(overrides.placed_layers(model)[0].inner_experts, TritonExperts)
    reference = build_local_model(TinyQwen3MoE(**small), seed=1)
    tokens, positions = torch.arange(20)[None], torch.arange(20)[None]
    out, expected = (
        one(tokens, positions=positions, attention_masks=one.get_attention_masks(positions)) for one in (model, reference)
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["debug_alone", "debug_pair"])
def test_torchtitans_debug_model_trains_with_the_stock_losses(request, ranks):
    results = request.getfixturevalue(ranks)[0]
    np.testing.assert_allclose(results["Triton"], results["stock"], rtol=0, atol=ROUNDING)


@pytest.mark.slow
def test_torchtitans_debug_model_gives_the_same_over_an_ep_group_and_under_the_interpreter(debug_alone, debug_pair):
    one = debug_alone[0]["Triton"]
    np.testing.assert_allclose(debug_pair[0]["Triton"], one, rtol=0, atol=2 * ROUNDING)
    np.testing.assert_allclose(debug_pair[0]["interpreted"], one[:1], rtol=0, atol=ROUNDING)
    assert len(set(one)) == len(one)
