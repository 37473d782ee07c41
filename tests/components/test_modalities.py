"""Windows of several modalities: every microbatch of one of them, on all ranks."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack.components import baselines
from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.components.modalities import Part, aligned, stacked
from routepack.components.packer import FirstFitPacker
from routepack.components.population_packer import PopulationPacker
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import InfeasibleError, PlanError, TraceError
from routepack.core.plans import SYNCS, PackingRules, Topology
from routepack.core.rollouts import RoutingDemand
from routepack.microbatches.materialize import microbatches
from routepack.planning.planner import Planner
from routepack.planning.verification import verify
from routepack.testing import check_packer, synthetic_batch, synthetic_demand
from routepack.traces.trace_files import concatenate, load_demand, load_trace, save_demand, save_trace

PACKERS = [*baselines.PACKERS, AttentionAwarePacker, PopulationPacker]
every_packer = pytest.mark.parametrize("kind", PACKERS, ids=lambda kind: kind.__name__)
TOPOLOGY = Topology(data_parallel_degree=4, expert_parallel_degree=2)
MIXED = synthetic_demand(num_sequences=64, max_length=128, num_modalities=2)


def planner(kind=AttentionAwarePacker, *, cap=256, topology=TOPOLOGY, **options):
    rules = {name: options.pop(name) for name in ("min_microbatches", "microbatch_multiple") if name in options}
    return Planner(topology=topology, packer=kind(max_tokens=cap, **rules), num_proposals=5000, **options)


@every_packer
@pytest.mark.parametrize("sync", SYNCS)
def test_every_microbatch_is_of_one_modality(kind, sync):
    plan = planner(kind, sync=sync).plan(MIXED)
    assert aligned(plan.packing.cell_of_S, MIXED.modality_S, 4)
    assert verify(plan, MIXED) == []


def test_a_mixed_window_planned_by_the_clock_is_legal():
    planned = Planner(topology=TOPOLOGY, packer=AttentionAwarePacker(max_tokens=256), time_limit_seconds=0.3)
    assert verify(planned.plan(MIXED), MIXED) == []


def test_without_modalities_the_same_window_is_mixed():
    """So that the tests above have something to see."""
    plan = planner().plan(replace(MIXED, modality_S=None))
    assert not aligned(plan.packing.cell_of_S, MIXED.modality_S, 4)


@given(st.integers(0, 2**32), st.sampled_from(SYNCS), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
@settings(max_examples=25)
def test_a_plan_of_any_mixed_window_is_legal_and_no_worse_than_its_baseline(seed, sync, kinds, multiple):
    rng = np.random.default_rng(seed)
    demand = synthetic_demand(num_sequences=48, max_length=100, num_experts=8, num_layers=2, seed=seed)
    demand = replace(demand, modality_S=rng.integers(0, kinds, 48))
    topology = Topology(data_parallel_degree=2, expert_parallel_degree=int(rng.choice([1, 2])))
    plan = planner(topology=topology, sync=sync, microbatch_multiple=multiple, seed=seed % 2**40).plan(demand)
    assert verify(plan, demand) == []
    assert plan.num_microbatches % multiple == 0


@every_packer
def test_packers_hold_the_invariants_on_mixed_windows_too(kind):
    check_packer(kind(max_tokens=512), num_windows=12)


@dataclass(frozen=True, kw_only=True)
class AcrossModalities(FirstFitPacker):
    """Packs as if all were one."""

    def _packed_apart(self, problem):
        return self._packed(replace(problem, modality_S=None))


def test_a_packer_that_mixes_is_found():
    with pytest.raises(PlanError, match="AcrossModalities mixed modalities in a microbatch"):
        check_packer(AcrossModalities(max_tokens=512))


def test_a_plan_that_mixes_is_found_by_the_checker_and_refused_by_the_trainer():
    batch = synthetic_batch(num_sequences=64, max_length=128, num_modalities=2)
    plan = planner(rerouter=baselines.LPTRerouter()).plan(replace(MIXED, modality_S=None))
    assert any("another window" in one for one in verify(plan, MIXED))
    claimed = replace(plan, demand_digest=MIXED.digest, digest="")
    assert any("mixes sequences of modality 0, 1; each must hold one" in one for one in verify(claimed, MIXED))
    with pytest.raises(PlanError, match=r"microbatch \d+ holds sequence \d+ of modality [01] and others of [01]"):
        microbatches(plan, batch, 0)
    assert microbatches(planner().plan(batch), batch, 0)


def test_the_microbatches_of_the_modalities_add_up():
    lengths = np.array([9] * 6 + [5] * 8)
    demand = demand_of(lengths, [0] * 6 + [1] * 8)
    plan = planner(cap=10, topology=Topology(data_parallel_degree=2, expert_parallel_degree=1)).plan(demand)
    # Six that fill a cell each, and eight of which two fit: 3 + 2 microbatches of two cells.
    assert (plan.num_microbatches, plan.certificate.lower_bound) == (5, 5)
    assert verify(plan, demand) == []


def demand_of(length_S, modality_S):
    length_S = np.asarray(length_S)
    tokens_SLE = np.zeros((len(length_S), 1, 2), dtype=np.int32)
    tokens_SLE[:, 0, 0] = length_S
    return RoutingDemand(tokens_SLE=tokens_SLE, length_S=length_S, top_k=1, modality_S=np.asarray(modality_S))


def test_a_modality_with_too_few_sequences_is_an_error_that_names_it():
    demand = demand_of([5] * 9, [3] * 8 + [7])
    with pytest.raises(InfeasibleError, match=r"modality 7 has 1 sequences and needs 1 microbatches of its own, 2 cells"):
        planner(cap=10, topology=Topology(data_parallel_degree=2, expert_parallel_degree=1)).plan(demand)


def test_equal_sequences_are_refused():
    packer = AttentionAwarePacker(max_tokens=256, equal_sequences=True)
    with pytest.raises(InfeasibleError, match="equal_sequences=True cannot be kept in a window of several modalities"):
        Planner(topology=TOPOLOGY, packer=packer).plan(MIXED)


def test_one_modality_is_as_none():
    same = replace(MIXED, modality_S=np.full(64, 5))
    one, other = planner().plan(same), planner().plan(replace(MIXED, modality_S=None))
    assert one.packing.cell_of_S.tolist() == other.packing.cell_of_S.tolist()


def test_missing_microbatches_go_to_the_modality_with_most_to_spare():
    parts = [part([0, 0, 1]), part([0, 1, 1, 0, 0], first=3)]
    cells = stacked(parts, PackingRules(min_microbatches=3))
    assert sorted((cells // 2).tolist()) == [0, 0, 0, 1, 1, 1, 2, 2]
    assert set((cells[:3] // 2).tolist()) == {0}
    assert stacked(parts, PackingRules(min_microbatches=5)) is None


def part(cells, first=0):
    members = np.arange(first, first + len(cells))
    return Part(members=members, length_S=np.full(len(cells), 3), cell_of_S=np.array(cells), num_ranks=2)


def test_the_digest_tells_modalities_apart():
    assert MIXED.digest != replace(MIXED, modality_S=None).digest != replace(MIXED, modality_S=1 - MIXED.modality_S).digest


def test_modalities_are_collected_whole_or_as_they_arrive():
    batch, collector = synthetic_batch(num_sequences=8, num_modalities=2), RoutingDemandCollector(num_experts=16)
    for s in range(8):
        tokens, modality = int(batch.num_tokens_S[s]), int(batch.modality_S[s])
        collector.add(batch.routed_experts_of(s), num_tokens=tokens, modality=modality)
    assert collector.demand().digest == RoutingDemandCollector().collect(batch).digest


def test_a_modality_for_some_sequences_alone_is_refused():
    batch, collector = synthetic_batch(num_sequences=8), RoutingDemandCollector(num_experts=16)
    collector.add(batch.routed_experts_of(0), num_tokens=int(batch.num_tokens_S[0]))
    with pytest.raises(TraceError, match="give a modality to all or to none"):
        collector.add(batch.routed_experts_of(1), num_tokens=int(batch.num_tokens_S[1]), modality=1)


def test_modalities_survive_files_and_shards(tmp_path):
    batch = synthetic_batch(num_sequences=8, num_modalities=2)
    save_trace(batch, tmp_path / "trace.safetensors")
    save_demand(MIXED, tmp_path / "demand.safetensors")
    read = load_trace(tmp_path / "trace.safetensors")
    assert read.modality_S.tolist() == batch.modality_S.tolist()
    assert "modality_ids" not in read.sequence_fields
    assert load_demand(tmp_path / "demand.safetensors").digest == MIXED.digest
    assert concatenate([batch, batch]).modality_S.tolist() == batch.modality_S.tolist() * 2
    with pytest.raises(TraceError, match="shards disagree on whether sequences have a modality"):
        concatenate([batch, synthetic_batch(num_sequences=8)])


def test_modalities_must_be_one_a_sequence():
    with pytest.raises(TraceError, match="modality_S has 3 entries"):
        replace(MIXED, modality_S=np.arange(3))
