import numpy as np
import pytest

from routepack.core.errors import ConfigError
from routepack.core.plans import SYNCS, Packing, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.cost.evaluation import evaluate
from routepack.cost.models import CostModel, CostRates, WindowNormalizedCost


def even_window(sequences=16, layers=3, experts=8, top_k=2, length=40):
    tokens_SLE = np.full((sequences, layers, experts), length * top_k // experts)
    return RoutingDemand(tokens_SLE=tokens_SLE, length_S=np.full(sequences, length), top_k=top_k)


def load_of(demand, ranks):
    shape = (demand.num_sequences, demand.num_layers, ranks, demand.num_experts // ranks)
    return demand.tokens_SLE.reshape(shape).sum(axis=-1).transpose(0, 2, 1).astype(np.int32)


def priced(demand, topology, cell_of_S, *, sync="step", rates=None):
    ranks = topology.data_parallel_degree
    packing = Packing(cell_of_S=cell_of_S, num_microbatches=(max(cell_of_S) + 1) // ranks, data_parallel_degree=ranks)
    return evaluate(
        load_SRL=load_of(demand, topology.expert_parallel_degree),
        length_S=demand.length_S,
        packing=packing,
        topology=topology,
        rates=rates or WindowNormalizedCost().rates(demand, topology),
        sync=sync,
    )


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize(
    ("data", "expert", "model"), [(4, 2, 1), (4, 4, 1), (4, 1, 1), (4, 4, 2), (4, 8, 2), (4, 8, 8), (4, 1, 2)]
)
def test_an_even_window_is_worth_one(sync, data, expert, model):
    topology = Topology(data_parallel_degree=data, expert_parallel_degree=expert, model_parallel_degree=model)
    assert priced(even_window(), topology, np.arange(16) % 8, sync=sync).value == pytest.approx(1.0)


def test_values_by_hand_for_each_sync():
    # Two groups of one rank, two microbatches; group 0 waits in the first, group 1 in the second.
    demand = RoutingDemand(tokens_SLE=[[[3]], [[1]], [[1]], [[2]]], length_S=[3, 1, 1, 2], top_k=1)
    topology = Topology(data_parallel_degree=2, expert_parallel_degree=1)
    rates = CostRates(expert=10.0, linear_I=[1.0], quadratic_I=[0.0])
    values = {sync: priced(demand, topology, np.arange(4), sync=sync, rates=rates).value for sync in SYNCS}
    assert values == {"step": 44.0, "microbatch": 55.0, "layer": 55.0}


def test_layer_sync_joins_the_fullest_ranks_of_different_groups_in_each_layer():
    # Group 0 peaks at 8 in the first layer and 4 in the second, group 1 the other way round.
    first, second = [[4, 0], [2, 2]], [[2, 2], [4, 0]]
    demand = RoutingDemand(tokens_SLE=[first, first, second, second], length_S=[4] * 4, top_k=1)
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=2)
    rates = CostRates(expert=1.0, linear_I=[0.0], quadratic_I=[0.0])
    values = {sync: priced(demand, topology, np.arange(4), sync=sync, rates=rates).value for sync in SYNCS}
    assert values == {"step": 12.0, "microbatch": 12.0, "layer": 16.0}


def test_attention_waits_for_the_costliest_rank_of_the_group_in_each_stage():
    demand = even_window(sequences=4)
    topology = Topology(data_parallel_degree=2, expert_parallel_degree=2)
    rates = CostRates(expert=0.0, linear_I=[1.0, 0.0], quadratic_I=[0.0, 1.0])
    demand = RoutingDemand(tokens_SLE=demand.tokens_SLE, length_S=[40, 40, 44, 40], top_k=2)
    # Cells: rank 0 holds 40 and 44 tokens, rank 1 twice 40; the stage of squares follows suit.
    assert priced(demand, topology, np.array([0, 1, 0, 1]), rates=rates).value == 84 + 40**2 + 44**2


def test_a_window_of_attention_counts_pairs_inside_it():
    rates = CostRates(expert=0.0, linear_I=[0.0], quadratic_I=[1.0], window_I=[4])
    assert rates.cost_SI(np.array([3, 4, 10]))[:, 0].tolist() == [9.0, 16.0, 2 * 4 * 10 - 16.0]


def test_imbalance_is_the_fullest_rank_over_the_mean_of_its_group():
    demand = RoutingDemand(tokens_SLE=[[[3, 1]], [[2, 2]]], length_S=[4, 4], top_k=1)
    topology = Topology(data_parallel_degree=2, expert_parallel_degree=2)
    assert priced(demand, topology, np.arange(2)).imbalance_MGL.tolist() == [[[5 / 4]]]


def test_terms_and_waiting_add_up_to_the_value():
    rng = np.random.default_rng(0)
    demand = RoutingDemand(tokens_SLE=rng.multinomial(60, np.full(8, 1 / 8), (16, 3)), length_S=np.full(16, 60), top_k=1)
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=2)
    for sync in SYNCS:
        evaluation = priced(demand, topology, np.arange(16) % 8, sync=sync)
        parts = evaluation.parts("planned")
        assert parts["planned.attention"] + parts["planned.expert"] + parts["planned.waiting"] == pytest.approx(
            evaluation.value
        )


def test_shares_that_do_not_add_up_are_refused():
    with pytest.raises(ConfigError, match="add up to 1"):
        WindowNormalizedCost(expert_share=0.6)


def test_known_models_have_rates_in_seconds():
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=2)
    rates = CostModel.for_model("qwen3_30b_a3b", device="h200").rates(even_window(), topology)
    assert rates.unit == "seconds"
    # 48 layers of 128 experts, 3 x 2048 x 768 weights each: training a routed row takes 6 FLOPs a weight.
    assert rates.expert == pytest.approx(6 * 3 * 2048 * 768 / (989e12 * 0.5))


def test_known_models_have_their_published_number_of_active_parameters():
    model = CostModel.for_model("qwen3_30b_a3b")
    dense = model.num_full_layers * model.attention_params + model.dense_params_per_token
    embedding = 2048 * 151_936
    routed = 48 * 8 * 3 * model.dim * model.moe_hidden_dim
    assert (dense + routed + embedding) / 1e9 == pytest.approx(3.3, abs=0.1)


def test_model_parallel_ranks_share_a_rank_s_tokens():
    window = even_window()
    model = CostModel.for_model("qwen3_30b_a3b")
    one = model.rates(window, Topology(data_parallel_degree=4, expert_parallel_degree=4))
    two = model.rates(window, Topology(data_parallel_degree=4, expert_parallel_degree=4, model_parallel_degree=2))
    assert (two.linear_I * 2 == one.linear_I).all()
    assert (two.quadratic_I * 2 == one.quadratic_I).all()
    assert two.expert == one.expert


def test_sliding_layers_are_a_stage_of_their_own():
    rates = CostModel.for_model("gpt_oss_20b").rates(even_window(), Topology(data_parallel_degree=4, expert_parallel_degree=2))
    assert rates.window_I.tolist() == [0, 128]
    full, sliding = rates.cost_SI(np.array([4096]))[0]
    assert sliding < full


@pytest.mark.parametrize(("name", "device", "known"), [("qwen9", "h200", "qwen3_30b_a3b"), ("qwen3_30b_a3b", "tpu", "h100")])
def test_unknown_models_and_devices_are_refused_with_the_known_ones(name, device, known):
    with pytest.raises(ConfigError, match=known):
        CostModel.for_model(name, device=device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linear_I": [np.inf]}, r"linear_I=\[inf\] must be finite"),
        ({"quadratic_I": [np.nan]}, "quadratic_I"),
        ({"linear_I": []}, "linear_I"),
        ({"linear_I": None}, "linear_I"),
        ({"linear_I": [[1.0], [2.0, 3.0]]}, "linear_I are no numbers"),
        ({"linear_I": [[1.0]]}, "linear_I"),
        ({"linear_I": [1.0, 2.0]}, "one per attention stage"),
        ({"quadratic_I": [-1.0]}, "none negative"),
        ({"window_I": [1.5]}, r"window_I=\[1.5\] must be whole"),
        ({"window_I": [2.0**62]}, "at most"),
        ({"expert": np.inf}, "cost rate expert=inf"),
        ({"inside": None}, "cost rate inside=None"),
        ({"unit": 3}, "unit"),
    ],
)
def test_rates_that_are_none_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CostRates(**{"expert": 1.0, "linear_I": [1.0], "quadratic_I": [1.0]} | options)


def test_rates_are_kept_apart_from_the_arrays_they_were_given_as():
    linear_I = np.array([1.0])
    rates = CostRates(expert=1.0, linear_I=linear_I, quadratic_I=[1.0])
    linear_I[0] = 5.0
    assert rates.linear_I.tolist() == [1.0]
    assert not any(rate_I.flags.writeable for rate_I in (rates.linear_I, rates.quadratic_I, rates.window_I))
