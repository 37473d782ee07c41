"""What went wrong in public stacks, one test each: the case's name is the thread where it was reported."""

import logging
from dataclasses import replace

import numpy as np
import pytest

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.baselines import EPLBRerouter, KarmarkarKarpPacker, LPTRerouter
from routepack.components.expert_rerouter import ExpertRerouter
from routepack.components.packer import FirstFitPacker
from routepack.components.rerouter import IdentityRerouter
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import ConfigError, InfeasibleError, TraceError
from routepack.core.plans import Topology
from routepack.core.rollouts import RolloutBatch, RoutingDemand
from routepack.microbatches.materialize import microbatches
from routepack.planning.planner import Planner
from routepack.planning.verification import verify
from routepack.solvers.rank_loads import rank_load
from routepack.testing import synthetic_batch, synthetic_demand

PACKERS = [AttentionAwarePacker, KarmarkarKarpPacker, FirstFitPacker]
every_packer = pytest.mark.parametrize("kind", PACKERS, ids=lambda kind: kind.__name__)


def demand_of(lengths, experts=4):
    length_S = np.array(lengths)
    tokens_SLE = np.zeros((len(length_S), 1, experts), dtype=np.int32)
    tokens_SLE[:, 0] = length_S[:, None] // experts
    tokens_SLE[:, 0, 0] += length_S % experts
    return RoutingDemand(tokens_SLE=tokens_SLE, length_S=length_S, top_k=1)


def plan_of(kind, lengths, *, cap, data, **rules):
    """A plan, accepted by the independent checker."""
    topology, demand = Topology(data_parallel_degree=data, expert_parallel_degree=1), demand_of(lengths)
    plan = Planner(topology=topology, packer=kind(max_tokens=cap, **rules), num_proposals=1000).plan(demand)
    assert verify(plan, demand) == []
    return plan


def tokens_of_cells(plan):
    return np.bincount(plan.packing.cell_of_S, plan.length_S, plan.packing.num_cells)


def sequences_of_ranks(plan):
    ranks = plan.topology.data_parallel_degree
    return np.bincount(plan.packing.cell_of_S % ranks, minlength=ranks)


# Planner and packer


def test_verl_7075_zero_filler_of_the_last_token_credits_no_expert():
    # Two different experts a token, never expert 0.
    ids = 1 + np.random.default_rng(0).random((12, 2, 7)).argsort(axis=-1)[..., :2].astype(np.uint8)
    valid_T = np.arange(12) % 4 != 3
    ids[~valid_T] = 0
    batch = RolloutBatch(
        routed_experts_TLK=ids, cu_seqlens=[0, 4, 8, 12], num_tokens_S=[4, 4, 4], num_experts=8, valid_T=valid_T
    )
    demand = RoutingDemandCollector().collect(batch)
    assert demand.tokens_LE[:, 0].tolist() == [0, 0]
    assert demand.tokens_LE.sum(axis=1).tolist() == [valid_T.sum() * 2] * 2


@every_packer
@pytest.mark.parametrize(
    ("lengths", "cap", "data", "rows"), [([7] * 8, 8, 1, 8), ([7] * 8, 8, 2, 4), ([30_720] * 16, 32_768, 4, 4)]
)
def test_verl_7553_sum_over_cap_is_only_a_lower_bound(kind, lengths, cap, data, rows):
    plan = plan_of(kind, lengths, cap=cap, data=data)
    assert tokens_of_cells(plan).max() <= cap
    assert (plan.num_microbatches, plan.certificate.certified) == (rows, True)


@every_packer
def test_verl_7553_a_sequence_over_the_cap_is_an_error(kind):
    with pytest.raises(InfeasibleError, match=r"packer.max_tokens=8 is shorter than sequence 1 \(9 tokens\)"):
        plan_of(kind, [7, 9], cap=8, data=1)


@every_packer
def test_verl_6735_balancing_squares_keeps_the_cap(kind):
    length_S = np.random.default_rng(0).lognormal(6, 1, 400).clip(10, 4096).astype(int)
    assert tokens_of_cells(plan_of(kind, length_S, cap=4096, data=4)).max() <= 4096


@every_packer
def test_verl_6176_all_ranks_run_as_many_microbatches(kind):
    # As they came, one rank would hold 10k tokens and the other 30k: one microbatch of 16k against two.
    plan = plan_of(kind, [1000] * 10 + [3000] * 10, cap=16_000, data=2)
    assert sorted(set((plan.packing.cell_of_S // 2).tolist())) == list(range(plan.num_microbatches))
    assert len(set(plan.packing.cell_of_S.tolist())) == 2 * plan.num_microbatches


@every_packer
def test_EasyR1_11012_sequences_move_to_a_rank_that_has_too_few(kind):
    # In order, a rank would get two long sequences and another twelve; four microbatches need four sequences on each.
    plan = plan_of(kind, [900, 900] + [450] * 12, cap=1000, data=2)
    assert plan.num_microbatches == 4
    assert sequences_of_ranks(plan).min() >= 4


@every_packer
def test_verl_6869_nine_over_four_are_three_two_two_two(kind):
    plan = plan_of(kind, [10] * 9, cap=100, data=4, equal_sequences=True, sequence_skew=1)
    assert sorted(sequences_of_ranks(plan).tolist()) == [2, 2, 2, 3]


@every_packer
def test_verl_3088_real_lengths_count_against_the_cap(kind):
    # 32 sequences of 1k, padded to 32k in the report: two cells of 16k hold them all.
    assert plan_of(kind, [1000] * 32, cap=16_000, data=2).num_microbatches == 1


@every_packer
def test_miles_1356_206_sequences_over_four_ranks(kind):
    assert plan_of(kind, [10] * 206, cap=10_000, data=4).num_microbatches == 1
    with_skew = plan_of(kind, [10] * 206, cap=10_000, data=4, equal_sequences=True, sequence_skew=1)
    assert sorted(sequences_of_ranks(with_skew).tolist()) == [51, 51, 52, 52]


@every_packer
def test_miles_1356_equal_sequences_say_what_to_drop_where_ranks_do_not_divide(kind):
    with pytest.raises(InfeasibleError, match=r"equal_sequences=True needs a multiple of the 4 ranks .* has 206 .*drop 2"):
        plan_of(kind, [10] * 206, cap=10_000, data=4, equal_sequences=True)


@every_packer
@pytest.mark.parametrize(("sequences", "ranks"), [(3, 4), (2, 4), (4, 8)], ids=["slime#1848", "verl#473", "RL#748"])
def test_slime_1848_verl_473_RL_748_fewer_sequences_than_ranks_are_an_error(kind, sequences, ranks):
    message = f"topology.data_parallel_degree={ranks} ranks need a sequence each; the window has {sequences}: use fewer ranks"
    with pytest.raises(InfeasibleError, match=message):
        plan_of(kind, [10] * sequences, cap=100, data=ranks)


@every_packer
def test_RL_648_cells_may_hold_any_number_of_sequences(kind):
    plan = plan_of(kind, np.arange(1, 250), cap=4000, data=2)
    sizes = [len(sequences) for sequences in plan.packing.cells()]
    assert sum(sizes) == 249
    assert min(sizes) >= 1


@every_packer
def test_prime_rl_1959_ranks_run_the_same_modality_in_every_microbatch(kind):
    # Text alone and with images: a rank that runs the vision encoder gathers its weights, and needs all others to.
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=1)
    demand = replace(demand_of([30, 50, 20, 40, 10] * 8), modality_S=np.arange(40) % 3 // 2)
    plan = Planner(topology=topology, packer=kind(max_tokens=100), num_proposals=1000).plan(demand)
    assert verify(plan, demand) == []
    for m in range(plan.num_microbatches):
        held = [demand.modality_S[plan.packing.sequences_of(m, rank)] for rank in range(4)]
        assert len(np.unique(np.concatenate(held))) == 1


def test_ms_swift_8102_SkyRL_847_there_are_no_dummy_microbatches():
    batch = synthetic_batch(num_sequences=9, max_length=64)
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=2)
    plan = Planner(topology=topology, packer=AttentionAwarePacker(max_tokens=64)).plan(batch)
    cells = [cell for rank in range(4) for cell in microbatches(plan, batch, rank)]
    assert len(cells) == 4 * plan.num_microbatches
    assert min(len(cell.sequences_S) for cell in cells) >= 1
    assert sorted(s for cell in cells for s in cell.sequences_S.tolist()) == list(range(9))


def test_trl_7328_rollout_groups_may_be_split_over_ranks():
    # Three prompts of eight rollouts on eight ranks: groups kept whole would leave five ranks without work.
    demand = synthetic_demand(num_sequences=24, group_size=8, max_length=64)
    topology = Topology(data_parallel_degree=8, expert_parallel_degree=2)
    plan = Planner(topology=topology, packer=AttentionAwarePacker(max_tokens=256)).plan(demand)
    assert len(np.unique(demand.group_S)) == 3
    assert sequences_of_ranks(plan).min() >= 1


@every_packer
def test_verl_1617_a_multiple_that_the_window_cannot_fill_is_an_error(kind):
    message = (
        r"packer.max_tokens=100 with packer.microbatch_multiple=4 needs 4 microbatches.* only 3 sequences.*lower packer.microb"
    )
    with pytest.raises(InfeasibleError, match=message):
        plan_of(kind, [10] * 3, cap=100, data=1, microbatch_multiple=4)


@every_packer
@pytest.mark.parametrize(("rules", "rows"), [({"microbatch_multiple": 4}, 4), ({"min_microbatches": 3}, 3)])
def test_verl_1617_multiples_and_minima_are_kept(kind, rules, rows):
    plan = plan_of(kind, [10] * 30, cap=100, data=2, **rules)
    assert (plan.num_microbatches, plan.certificate.certified) == (rows, True)


def test_RL_4105_padding_counts_for_no_expert_and_is_marked():
    batch = synthetic_batch(num_sequences=8, max_length=50)
    demand = RoutingDemandCollector().collect(batch)
    assert demand.tokens_LE.sum(axis=1).tolist() == [len(batch.routed_experts_TLK) * batch.top_k] * batch.num_layers
    topology = Topology(data_parallel_degree=2, expert_parallel_degree=2)
    plan = Planner(topology=topology, packer=AttentionAwarePacker(max_tokens=200)).plan(demand)
    for cell in microbatches(plan, batch, 0, pad_to_multiple_of=64):
        assert cell.num_tokens % 64 == 0
        assert cell.num_padding == cell.num_tokens - (batch.num_tokens_S[cell.sequences_S] - 1).sum()
        assert (cell.target_index_n[cell.num_tokens - cell.num_padding :] == -1).all()


# Placement and replicas

REROUTERS = [IdentityRerouter(), LPTRerouter(), EPLBRerouter(), EPLBRerouter(num_groups=8, num_nodes=4), ExpertRerouter()]
every_rerouter = pytest.mark.parametrize("rerouter", REROUTERS, ids=str)


@every_rerouter
def test_EPLB_22_no_rank_holds_an_expert_twice(rerouter):
    tokens_LE = np.random.default_rng(0).zipf(1.5, (3, 256)).clip(1, 10**6)
    topology = Topology(data_parallel_degree=32, expert_parallel_degree=32)
    slots_LP = rerouter.place(tokens_LE, topology).physical_to_logical_LP
    assert all(len(set(rank)) == 8 for row in slots_LP for rank in row.reshape(32, 8).tolist())


def test_sglang_8253_ranks_that_the_nodes_do_not_divide_are_refused_early():
    topology = Topology(data_parallel_degree=9, expert_parallel_degree=9)
    tokens_LE = np.ones((1, 18), dtype=np.int64)
    with pytest.raises(ConfigError, match=r"num_nodes=2 does not divide the 9 ranks .* num_nodes=1 for flat placement"):
        EPLBRerouter(num_nodes=2).place(tokens_LE, topology)
    assert EPLBRerouter(num_nodes=1).place(tokens_LE, topology).num_experts == 18


@every_rerouter
def test_vllm_30614_TensorRT_LLM_13888_sixty_experts_on_eight_ranks_are_refused_and_on_six_placed_once(rerouter):
    tokens_LE = np.random.default_rng(0).integers(0, 1000, (2, 60))
    with pytest.raises(ConfigError, match=r"expert_parallel_degree=8 does not divide the 60 experts.*the nearest are 6 or 10"):
        rerouter.place(tokens_LE, Topology(data_parallel_degree=8, expert_parallel_degree=8))
    if isinstance(rerouter, EPLBRerouter) and rerouter.num_nodes > 1:
        return
    placement = rerouter.place(tokens_LE, Topology(data_parallel_degree=6, expert_parallel_degree=6))
    assert (np.sort(placement.physical_to_logical_LP, axis=1) == np.arange(60)).all()
    assert (np.bincount(placement.rank_of_LE(6)[0]) == 10).all()


def test_vllm_22167_counts_of_one_rank_s_experts_only_are_refused():
    demand = synthetic_demand(num_sequences=8, max_length=32)
    partial_SLE = demand.tokens_SLE.copy()
    partial_SLE[:, 1, 8:] = 0
    with pytest.raises(TraceError, match="every layer routes the same tokens, so counts must agree"):
        RoutingDemand(tokens_SLE=partial_SLE, length_S=demand.length_S, top_k=demand.top_k)


def test_vllm_ascend_8501_demand_counts_logical_experts_and_ranks_hold_physical_slots():
    demand = synthetic_demand(num_sequences=8, max_length=32)
    placement = ExpertRerouter().place(demand.tokens_LE, Topology(data_parallel_degree=4, expert_parallel_degree=4))
    load_SRL = rank_load(demand.tokens_SLE, placement.rank_of_LE(4), 4)
    for layer in range(demand.num_layers):
        for slot, expert in enumerate(placement.physical_to_logical_LP[layer]):
            load_SRL[:, slot // 4, layer] -= demand.tokens_SLE[:, layer, expert]
    assert not load_SRL.any()


def test_vllm_39178_imbalance_is_the_fullest_rank_over_the_mean():
    demand = synthetic_demand(num_sequences=24, max_length=64)
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=2)
    plan = Planner(topology=topology, packer=FirstFitPacker(max_tokens=256), rerouter=IdentityRerouter()).plan(demand)
    ratios = []
    for m in range(plan.num_microbatches):
        for g in range(2):
            held = [s for w in (2 * g, 2 * g + 1) for s in plan.packing.sequences_of(m, w)]
            for layer in range(demand.num_layers):
                loads = [int(demand.tokens_SLE[held, layer, r * 8 : r * 8 + 8].sum()) for r in range(2)]
                ratios.append(max(loads) / (sum(loads) / 2))
    assert plan.parts["planned.imbalance_mean"] == pytest.approx(np.mean(ratios))
    assert plan.parts["planned.imbalance_max"] == pytest.approx(max(ratios))


def test_EPLB_14_groups_that_the_nodes_do_not_divide_are_placed_flat_and_said_so(caplog):
    tokens_LE = np.random.default_rng(0).integers(0, 1000, (2, 24))
    topology = Topology(data_parallel_degree=8, expert_parallel_degree=8)
    with caplog.at_level(logging.WARNING):
        placed = EPLBRerouter(num_groups=3, num_nodes=2).place(tokens_LE, topology)
    assert "num_groups=3 expert groups do not divide over num_nodes=2: experts are placed flat" in caplog.text
    flat = EPLBRerouter().place(tokens_LE, topology)
    assert placed.physical_to_logical_LP.tolist() == flat.physical_to_logical_LP.tolist()
