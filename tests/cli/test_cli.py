import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from routepack.cli.main import app, main
from routepack.core.rollouts import RolloutBatch
from routepack.traces.trace_files import load_plan, load_window, save_demand, save_trace

PLAN = str(Path(__file__).parents[2] / "configs/plan.yaml")
FIRST_FIT = str(Path(__file__).parents[2] / "configs/first_fit.yaml")
SMALL = ["topology.data_parallel_degree=2", "topology.expert_parallel_degree=2", "packer.max_tokens=64", "num_proposals=2000"]


@pytest.fixture
def routepack(capsys):
    """Run the command in this process: (exit code, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(lambda: app([str(arg) for arg in args], prog_name="routepack"))
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return stop.value.code, out, err

    return run


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "trace.safetensors")


def write_trace(path, *, lengths=None, experts=8, ids=None, rows=None, valid=None):
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 40, 24) if lengths is None else np.asarray(lengths)
    rows = lengths - 1 if rows is None else np.asarray(rows)
    if ids is None:
        ids = np.argsort(rng.random((rows.sum(), 3, experts)), axis=-1)[..., :2]
    batch = RolloutBatch(
        routed_experts_TLK=np.asarray(ids, np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(rows)]),
        num_tokens_S=lengths,
        num_experts=experts,
        valid_T=valid,
    )
    save_trace(batch, path)
    return path


def planned(routepack, trace, *extra):
    out = trace.parent / "plan.safetensors"
    code, stdout, _ = routepack("plan", PLAN, f"trace={trace}", f"out={out}", *SMALL, *extra)
    assert code == 0
    return out, stdout


def test_plan_shows_baseline_plan_and_bound_and_writes_the_plan(routepack, trace):
    out, stdout = planned(routepack, trace)
    plan = load_plan(out)
    for figure in (plan.baseline_value, plan.value, plan.bound):
        assert f"{figure:.4f}" in stdout
    assert "certified" in stdout


def test_plan_json_holds_the_plan_s_figures(routepack, trace):
    out, stdout = planned(routepack, trace, "--json")
    figures, plan = json.loads(stdout), load_plan(out)
    assert (figures["value"], figures["bound"], figures["digest"]) == (plan.value, plan.bound, plan.digest)


def test_a_demand_gives_the_same_plan_as_its_trace(routepack, trace, tmp_path):
    from routepack.components.routing_demand_collector import RoutingDemandCollector

    save_demand(RoutingDemandCollector().collect(load_window(trace)), tmp_path / "demand.safetensors")
    first = load_plan(planned(routepack, trace)[0])
    again = load_plan(planned(routepack, tmp_path / "demand.safetensors")[0])
    assert first.digest == again.digest


def test_the_first_fit_overlay_switches_planning_off(routepack, trace):
    plan = load_plan(planned(routepack, trace, FIRST_FIT)[0])
    assert plan.value == plan.baseline_value
    assert (plan.placement.physical_to_logical_LP == np.arange(8)).all()


def test_more_microbatches_than_it_takes_are_not_called_certified(routepack, tmp_path):
    trace, out = write_trace(tmp_path / "trace.safetensors", lengths=[14, 12, 9, 9, 8, 8]), tmp_path / "plan.safetensors"
    options = ["topology.data_parallel_degree=1", "topology.expert_parallel_degree=1", "packer.max_tokens=30"]
    options += ["packer._target_=routepack.FirstFitPacker", "num_proposals=100"]
    code, stdout, _ = routepack("plan", PLAN, f"trace={trace}", f"out={out}", *options)
    assert (code, load_plan(out).num_microbatches) == (0, 3)
    assert "M = 3 (2 possible: certified, " in stdout


def test_links_and_moves_are_sections_of_a_config(routepack, trace):
    two_nodes = ["links._target_=routepack.WindowNormalizedLinks", "links.across_share=0.3", "topology.ranks_per_node=1"]
    moves = ["move_policy._target_=routepack.AlwaysMove", "rerouter._target_=routepack.HierarchicalRerouter"]
    out, stdout = planned(routepack, trace, *two_nodes, *moves)
    assert "rows to other nodes" in stdout
    assert load_plan(out).cost["links"] == {
        "model": "WindowNormalizedLinks", "options": {"inside_share": 0.0, "across_share": 0.3}
    }  # fmt: skip
    assert routepack("verify", out, trace)[0] == 0


def test_verify_accepts_a_plan(routepack, trace):
    out, _ = planned(routepack, trace)
    code, stdout, _ = routepack("verify", out, trace)
    assert (code, "accepted" in stdout) == (0, True)


@pytest.mark.parametrize("tensor", ["cell_of_sequence", "physical_to_logical", "length", "order"])
def test_verify_rejects_a_plan_after_any_change(routepack, trace, tensor):
    out, _ = planned(routepack, trace)
    tensors = load_file(out)
    flat = tensors[tensor].reshape(-1)
    other = 1 + int(np.argmax(flat[1:] != flat[0]))
    flat[[0, other]] = flat[[other, 0]]
    from safetensors import safe_open

    with safe_open(out, "np") as file:
        save_file(tensors, out, metadata=file.metadata())
    code, _, err = routepack("verify", out, trace)
    assert code == 1
    assert "rejected" in err or "order_S" in err or "empty" in err


def test_verify_rejects_another_trace(routepack, trace, tmp_path):
    out, _ = planned(routepack, trace)
    other = write_trace(tmp_path / "other.safetensors", lengths=np.arange(5, 29))
    assert routepack("verify", out, other)[0] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["packer.max_tokens=8"], r"packer.max_tokens=8 is shorter than sequence"),
        (["topology.data_parallel_degree=32"], "topology.data_parallel_degree=32"),
        (["topology.data_parallel_degree=3", "topology.expert_parallel_degree=3"], "does not divide the 8 experts"),
        (["topology.expert_parallel_degree=3"], "does not divide the 2 ranks"),
        (["packer.max_token=9"], "packer.max_token is no option of AttentionAwarePacker: did you mean max_tokens?"),
        (["packer._target_=routepack.ExpertRerouter"], "is not a Packer"),
        (["sync=sometimes"], "sync='sometimes' is unknown"),
        (["seed=x"], "seed='x'"),
        (["num_proposals=0"], "num_proposals=0"),
        (["trace=absent.safetensors"], "absent.safetensors cannot be read"),
        (["trace=[1,2]"], "trace=[1, 2] is no path"),
        (["out={a: 1}"], "out={'a': 1} is no path: name a file, as in out=plan.safetensors"),
        (["out="], "out is not set: name a file, as in out=plan.safetensors"),
        (["trace="], "trace is not set: name a file, as in trace=rollouts.safetensors"),
        (["packer.max_tokens=1.5"], "packer.max_tokens=1.5"),
    ],
)
def test_wrong_options_end_with_1_and_write_nothing(routepack, trace, options, message):
    out = trace.parent / "plan.safetensors"
    code, _, err = routepack("plan", PLAN, f"trace={trace}", f"out={out}", *SMALL, *options)
    assert code == 1
    assert message in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"ids": np.full((69, 3, 2), 8), "lengths": [24, 24, 24]}, "expert id 8 is not below num_experts=8"),
        ({"ids": np.full((69, 3, 2), -1), "lengths": [24, 24, 24]}, "is negative: mark rows"),
    ],
)
def test_wrong_ids_end_with_1_and_write_nothing(routepack, tmp_path, window, message):
    trace = write_trace(tmp_path / "t.safetensors", **window)
    out = tmp_path / "plan.safetensors"
    code, _, err = routepack("plan", PLAN, f"trace={trace}", f"out={out}", *SMALL)
    assert (code, out.exists()) == (1, False)
    assert message in err


def test_rows_that_match_no_sequence_end_with_1(routepack, tmp_path):
    trace = write_trace(tmp_path / "t.safetensors", lengths=[24, 24, 24])
    tensors = load_file(trace)
    tensors["num_tokens"][1] = 30
    save_file(tensors, trace, metadata={"format": "routepack.trace/1", "num_experts": "8"})
    code, _, err = routepack("plan", PLAN, f"trace={trace}", f"out={tmp_path / 'p'}", *SMALL)
    assert code == 1
    assert "sequence 1 has 23 recorded rows for 30 tokens" in err


def test_a_truncated_trace_ends_with_1(routepack, trace):
    trace.write_bytes(trace.read_bytes()[:-100])
    code, _, err = routepack("plan", PLAN, f"trace={trace}", f"out={trace.parent / 'p'}", *SMALL)
    assert (code, "truncated" in err) == (1, True)


def test_wrong_usage_ends_with_2(routepack):
    assert routepack("plan")[0] == 2
    assert routepack("nothing")[0] == 2
    assert routepack("verify", "one")[0] == 2


def test_check_resolves_a_config(routepack, trace):
    code, stdout, _ = routepack("check", PLAN, f"trace={trace}")
    assert code == 0
    assert "max_tokens: 16384" in stdout


def rewritten(path, **changes):
    """The plan file with entries of its header changed (dots descend; ... deletes)."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        header = json.loads(file.metadata()["plan"])
    for name, value in changes.items():
        *parents, last = name.split("__")
        entry = header
        for parent in parents:
            entry = entry[parent]
        if value is ...:
            del entry[last]
        else:
            entry[last] = value
    save_file(load_file(path), path, metadata={"format": "routepack.plan/1", "plan": json.dumps(header)})


@pytest.mark.parametrize(
    "changes",
    [
        {"value": 1.0}, {"value": None}, {"value": "abc"}, {"value": float("nan")}, {"bound": 0.5}, {"bound": float("nan")},
        {"baseline_value": float("inf")}, {"baseline_microbatches": 7}, {"baseline_microbatches": ...}, {"unit": "zzz"},
        {"certificate__lower_bound": -1}, {"certificate__lower_bound": None}, {"certificate__method": "zzz"},
        {"cost__expert": "abc"}, {"cost__expert": float("inf")}, {"cost__linear": None}, {"cost__options": {}}, {"cost": 3},
        {"parts": {}}, {"parts": 3}, {"seed": 1}, {"seed": "abc"}, {"budget": {}}, {"sync": "layer"}, {"versions": {}},
        {"digest": ""}, {"digest": ...}, {"digest": 3}, {"max_tokens": None}, {"max_tokens": 2**70},
        {"num_microbatches": 2**70}, {"topology__data_parallel_degree": 2**70}, {"topology__ranks_per_node": 4},
        {"topology": 3}, {"rules": 3}, {"cost__quadratic": [1.0, 2.0]}, {"cost__linear": 1.0}, {"cost__linear": []},
        {"cost__inside": "abc"}, {"cost__expert": [1.0]}, {"cost__model": 3}, {"cost__options": "abc"}, {"cost__links": 3},
        {"num_microbatches": 2**31 - 1}, {"topology__data_parallel_degree": 2**30}, {"rules__equal_sequences": "yes"},
        {"versions": {"numpy": [1]}}, {"bound": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_verify_rejects_a_plan_whose_header_was_changed(routepack, trace, changes):
    out, _ = planned(routepack, trace)
    rewritten(out, **changes)
    code, _, err = routepack("verify", out, trace)
    assert (code, err.startswith("routepack: ")) == (1, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"digest": ...}, "its header lacks digest"),
        ({"certificate": ...}, "its header lacks certificate"),
        ({"value": ..., "bound": ...}, "its header lacks value, bound"),
        ({"topology": None}, "topology is a NoneType, no JSON object"),
        ({"topology__expert_parallel_degree": ...}, "topology lacks expert_parallel_degree"),
        ({"rules": [1]}, "rules is a list, no JSON object"),
        ({"colour": 3}, "its header has colour, which no plan has"),
        ({"certificate__proof": 3}, "certificate has proof, which no plan has"),
        ({"value": 10**400}, "must be a finite number"),
    ],
    ids=str,
)
def test_what_a_plan_s_header_lacks_is_named(routepack, trace, changes, message):
    out, _ = planned(routepack, trace)
    rewritten(out, **changes)
    code, _, err = routepack("verify", out, trace)
    assert (code, message in err, str(out) in err) == (1, True, True)


@pytest.mark.parametrize(
    ("plan", "message"),
    [("null", "its header is a NoneType, no JSON object"), ("{", "its header is no JSON"), (None, "lacks the metadata entry")],
)
def test_a_plan_without_a_header_says_so(routepack, trace, plan, message):
    out, _ = planned(routepack, trace)
    save_file(load_file(out), out, metadata={"format": "routepack.plan/1"} | ({} if plan is None else {"plan": plan}))
    code, _, err = routepack("verify", out, trace)
    assert (code, message in err, "Error" in err) == (1, True, False)


def test_a_plan_without_a_tensor_names_it(routepack, trace):
    out, _ = planned(routepack, trace)
    with safe_open(out, framework="np") as file:
        metadata = file.metadata()
    tensors = load_file(out)
    save_file({name: tensors[name] for name in tensors if name != "order"}, out, metadata=metadata)
    assert "has no tensor 'order'" in routepack("verify", out, trace)[2]
    save_file(tensors | {"order": tensors["order"][:-1]}, out, metadata=metadata)
    assert "order_S has 23 entries for 24 sequences" in routepack("verify", out, trace)[2]


def test_verify_looks_past_how_long_planning_took(routepack, trace):
    out, _ = planned(routepack, trace)
    rewritten(out, plan_seconds=99.0)
    assert routepack("verify", out, trace)[0] == 0


@pytest.mark.parametrize("override", ["seed=${seed}", "seed=${nowhere}", "out=${oc.env:NOT_SET_ANYWHERE}"])
def test_a_reference_that_leads_nowhere_ends_with_1(routepack, trace, override):
    code, _, err = routepack("plan", PLAN, f"trace={trace}", *SMALL, override)
    assert code == 1
    assert err.startswith("routepack: ")


def step_log(path, *, steps=40):
    """A log of steps that a known cost model takes under sync=layer; two EP groups."""
    from routepack.cost.calibration import MeasuredCost
    from routepack.cost.step_log import StepLoads, StepRecord

    rng, lines = np.random.default_rng(0), []
    model = MeasuredCost(token_seconds=2e-4, pair_seconds=3e-7, expert_seconds=1e-5, step_seconds=0.2)
    for step in range(steps):
        tokens_MW, rows_MG = rng.integers(500, 1024, (3, 4)), rng.integers(5000, 9000, (3, 2))
        pairs_MW, joined_rows_M = tokens_MW * rng.integers(50, 400, (3, 4)), rows_MG.max(axis=1) + rng.integers(0, 500, 3)
        loads = StepLoads(tokens_MW=tokens_MW, pairs_MW=pairs_MW, rows_MG=rows_MG, joined_rows_M=joined_rows_M)
        lines.append(StepRecord(loads=loads, seconds=model.predicted_seconds(loads, "layer"), step=step).to_json())
    path.write_text("\n".join(lines))
    return path


def test_calibrate_writes_a_layer_that_plans_in_seconds(routepack, trace, tmp_path):
    layer = tmp_path / "cost_model.yaml"
    code, stdout, _ = routepack("calibrate", step_log(tmp_path / "steps.jsonl"), "--out", layer)
    assert code == 0
    assert "sync=layer predicts best" in stdout
    assert "expert_seconds: 1.000000e-05" in layer.read_text()
    out = tmp_path / "plan.safetensors"
    code, stdout, _ = routepack("plan", PLAN, layer, f"trace={trace}", f"out={out}", *SMALL)
    assert code == 0
    assert "step, sync=layer (s)" in stdout
    assert load_plan(out).cost["model"] == "MeasuredCost"


def test_calibrate_keeps_the_sync_where_the_groups_are_one(routepack, tmp_path):
    lines = [json.loads(line) for line in step_log(tmp_path / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        line["rows_MG"] = [[rows[0]] for rows in line["rows_MG"]]
        line["joined_rows_M"] = [rows[0] for rows in line["rows_MG"]]
    log = tmp_path / "one.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)))
    code, stdout, _ = routepack("calibrate", log, "--out", tmp_path / "layer.yaml", "--sync", "microbatch", "--json")
    assert code == 0
    assert json.loads(stdout)["sync"] == "microbatch"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("", "no step is logged"), ("x", "line 1: not JSON"), ("few", "cannot tell")],
)
def test_calibrate_refuses_a_log_that_tells_nothing(routepack, tmp_path, content, message):
    log = tmp_path / "steps.jsonl"
    if content == "few":
        step_log(log, steps=3)
    elif content is not None:
        log.write_text(content)
    code, _, err = routepack("calibrate", log, "--out", tmp_path / "layer.yaml")
    assert code == 1
    assert message in err
    assert not (tmp_path / "layer.yaml").exists()


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_calibrate_leaves_out_a_last_line_that_was_cut_off(routepack, tmp_path, kept):
    log = step_log(tmp_path / "steps.jsonl")
    whole, torn = log.read_text(), log.read_text().splitlines()[0][:kept]
    log.write_text(f"{whole}\n{torn}")
    with pytest.warns(UserWarning, match=r"steps\.jsonl: the last line, 41, was cut off"):
        code, _, _ = routepack("calibrate", log, "--out", tmp_path / "layer.yaml")
    assert (code, "40 steps" in (tmp_path / "layer.yaml").read_text()) == (0, True)
    for text in (f"{whole}\n{torn}\n", f"{torn}\n{whole}"):
        log.write_text(text)
        code, _, err = routepack("calibrate", log, "--out", tmp_path / "layer.yaml")
        assert (code, "not JSON" in err, "remove the line" in err) == (1, True, True)


def test_calibrate_refuses_an_unknown_sync(routepack, tmp_path):
    code, _, err = routepack("calibrate", step_log(tmp_path / "steps.jsonl"), "--sync", "epoch")
    assert code == 1
    assert "choose step, microbatch, layer" in err


def test_inspect_shows_routing_and_gains_and_writes_all_figures(routepack, trace, tmp_path):
    out = tmp_path / "figures.json"
    code, stdout, _ = routepack(
        "inspect", trace, "--ep", "2,3", "--dp", "2", "--max-tokens", 128, "--proposals", 500, "--json", out
    )
    assert code == 0
    figures = json.loads(out.read_text())
    hottest = figures["routing"]["layers"]["hottest_over_mean_L"]
    assert f"{max(hottest):.2f}" in stdout
    assert "does not divide" in stdout
    assert [gain["gain"] is None for gain in figures["gains"]] == [False, True]


def test_inspect_reads_a_demand_and_can_leave_planning_out(routepack, trace, tmp_path):
    from routepack.components.routing_demand_collector import RoutingDemandCollector

    save_demand(RoutingDemandCollector().collect(load_window(trace)), tmp_path / "demand.safetensors")
    code, stdout, _ = routepack("inspect", tmp_path / "demand.safetensors", "--dp", "")
    assert (code, "Hottest" in stdout, "planning" in stdout) == (0, True, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ep", "two"], "--ep='two'"),
        (["--sync", "never"], "--sync='never'"),
        (["--model", "gpt-9"], "model 'gpt-9' is not known"),
        (["--by", "taste"], "by='taste'"),
    ],
)
def test_inspect_names_the_option_that_is_wrong(routepack, trace, options, message):
    code, _, err = routepack("inspect", trace, *options)
    assert (code, message in err) == (1, True)


@pytest.mark.parametrize("dp", ["2", ""])
def test_inspect_shows_nothing_of_a_trace_without_valid_rows(routepack, tmp_path, dp):
    lengths = np.arange(4, 28)
    masked = write_trace(tmp_path / "masked.safetensors", lengths=lengths, valid=np.zeros((lengths - 1).sum(), bool))
    code, stdout, err = routepack("inspect", masked, "--dp", dp)
    assert (code, stdout) == (1, "")
    assert "masked.safetensors: none of its 24 sequences has a recorded row (348 rows are masked)" in err


def test_inspect_shows_nothing_where_planning_lacks_rows(routepack, tmp_path):
    lengths = np.arange(4, 28)
    valid = np.zeros((lengths - 1).sum(), bool)
    valid[0] = True
    code, stdout, err = routepack("inspect", write_trace(tmp_path / "t.safetensors", lengths=lengths, valid=valid), "--dp", "2")
    assert (code, stdout, "has recorded routes for 50% of its rows" in err) == (1, "", True)


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_wrong_ids_are_told_with_the_trace_they_stand_in(routepack, trace, command):
    twice = write_trace(trace.parent / "twice.safetensors", lengths=[5] * 8, ids=np.tile([[1, 1], [2, 3], [4, 5]], (32, 1, 1)))
    args = [twice] if command == "inspect" else [PLAN, f"trace={twice}", f"out={trace.parent / 'p.safetensors'}", *SMALL]
    code, stdout, err = routepack(command, *args)
    assert (code, stdout, f"{twice}: sequence 0, row 0, layer 0: expert id 1 stands twice" in err) == (1, "", True)


def test_a_trace_s_own_words_do_not_style_the_terminal(routepack, trace, tmp_path):
    from dataclasses import replace

    save_trace(replace(load_window(trace), source="[red]x[/red]\x1b[31m\nno"), tmp_path / "hostile.safetensors")
    code, stdout, _ = routepack("inspect", tmp_path / "hostile.safetensors", "--dp", "")
    assert (code, "[red]x[/red]" in stdout, "\x1b" in stdout) == (0, True, False)


def test_report_writes_one_page_with_or_without_the_trace(routepack, trace, tmp_path):
    out, _ = planned(routepack, trace)
    for given in ([trace], []):
        page = tmp_path / "page.html"
        code, stdout, _ = routepack("report", out, *given, "--out", page)
        assert (code, "open it in a browser" in stdout) == (0, True)
        text = page.read_text()
        assert f"{load_plan(out).value:.3f}" in text
        assert ("No trace was given" in text) == (not given)


def test_report_names_the_extra_that_it_lacks(routepack, trace, tmp_path, monkeypatch):
    out, _ = planned(routepack, trace)
    monkeypatch.delitem(sys.modules, "routepack.report.plan_page", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, _, err = routepack("report", out, "--out", tmp_path / "page.html")
    assert (code, err) == (1, "routepack: this needs jinja2: pip install 'routepack[report]'.\n")


def test_a_module_that_no_extra_installs_is_not_hidden():
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        main(lambda: importlib.import_module("nowhere"))


def test_report_refuses_another_trace(routepack, trace, tmp_path):
    out, _ = planned(routepack, trace)
    other = write_trace(tmp_path / "other.safetensors", lengths=np.arange(5, 29))
    code, _, err = routepack("report", out, other, "--out", tmp_path / "page.html")
    assert (code, "another window" in err, (tmp_path / "page.html").exists()) == (1, True, False)


def test_a_config_of_train_is_no_config_of_plan(routepack):
    code, _, err = routepack("plan", str(Path(PLAN).with_name("tiny_rl.yaml")))
    assert code == 1
    assert "this is a config of 'routepack train'" in err
