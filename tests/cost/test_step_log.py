import json

import numpy as np
import pytest

from routepack.components.attention_aware_packer import AttentionAwarePacker
from routepack.core.errors import ConfigError, TraceError
from routepack.core.plans import Topology
from routepack.cost.step_log import StepLoads, StepRecord, load_steps
from routepack.planning.planner import Planner
from routepack.testing import synthetic_demand


def a_record(**changes):
    loads = {"tokens_MW": [[3, 4]], "pairs_MW": [[9, 16]], "rows_MG": [[5]], "joined_rows_M": [5]}
    return StepRecord(loads=StepLoads(**{**loads, **changes}), seconds=1.5, step=7, predicted_seconds={"step": 1.25})


def planned(sync="step"):
    demand = synthetic_demand(num_sequences=24, max_length=60)
    topology = Topology(data_parallel_degree=4, expert_parallel_degree=2)
    plan = Planner(topology=topology, packer=AttentionAwarePacker(max_tokens=256), sync=sync, num_proposals=500).plan(demand)
    return plan, demand


def by_loops(plan, demand):
    """Tokens, pairs, and rows of the fullest EP rank, counted one sequence at a time."""
    microbatches, ranks = plan.num_microbatches, plan.topology.data_parallel_degree
    tokens, pairs = np.zeros((microbatches, ranks)), np.zeros((microbatches, ranks))
    rows = np.zeros((microbatches, 2, 2, demand.num_layers))
    rank_of_LE = plan.placement.rank_of_LE(2)
    for s, cell in enumerate(plan.packing.cell_of_S):
        m, w = divmod(int(cell), ranks)
        tokens[m, w] += demand.length_S[s]
        pairs[m, w] += int(demand.length_S[s]) ** 2
        for layer in range(demand.num_layers):
            for expert in range(demand.num_experts):
                rows[m, w // 2, rank_of_LE[layer, expert], layer] += demand.tokens_SLE[s, layer, expert]
    return tokens, pairs, rows


def test_planned_loads_are_those_counted_sequence_by_sequence():
    plan, demand = planned()
    loads = StepLoads.planned(plan, demand)
    tokens, pairs, rows = by_loops(plan, demand)
    assert np.array_equal(loads.tokens_MW, tokens)
    assert np.array_equal(loads.pairs_MW, pairs)
    assert np.array_equal(loads.rows_MG, rows.max(axis=2).sum(axis=-1))
    assert np.array_equal(loads.joined_rows_M, rows.max(axis=(1, 2)).sum(axis=-1))


def test_some_microbatches_alone_have_their_own_loads():
    plan, demand = planned()
    rows = by_loops(plan, demand)[2].astype(int)
    some = np.array([plan.num_microbatches - 1])
    assert np.array_equal(StepLoads.of_rows(plan, rows[some], some).tokens_MW, StepLoads.planned(plan, demand).tokens_MW[some])


def test_a_record_survives_the_file(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(a_record().to_json() + "\n\n" + a_record(rows_MG=[[6]]).to_json() + "\n")
    first, second = load_steps([path])
    assert (first.to_json(), second.to_json()) == (a_record().to_json(), a_record(rows_MG=[[6]]).to_json())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "steps.jsonl, line 1: not JSON"),
        ("[]", "not a line of routepack.steps/1"),
        ('{"format": "routepack.steps/2"}', "not a line of routepack.steps/1"),
        ('{"format": "routepack.steps/1", "seconds": 1}', "tokens_MW, pairs_MW, rows_MG, joined_rows_M missing"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, line, message):
    path = tmp_path / "steps.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(TraceError, match=message):
        load_steps([path])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seconds", 0.0, "must be above 0"),
        ("seconds", "long", "finite number"),
        ("tokens_MW", [[3, 4], [5, 6]], "same microbatches"),
        ("rows_MG", [[5, 5, 5]], "groups must divide ranks"),
        ("pairs_MW", [[-9, 16]], "it has -9"),
    ],
)
def test_a_line_that_contradicts_itself_is_refused(tmp_path, field, value, message):
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps({**json.loads(a_record().to_json()), field: value}))
    with pytest.raises(TraceError, match=message):
        load_steps([path])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.jsonl cannot be read"):
        load_steps([tmp_path / "nothing.jsonl"])
