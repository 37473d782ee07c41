"""``routepack convert``: what it writes, says and refuses."""

import json
import re

import numpy as np
import pytest

from routepack.cli.main import app, main
from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.report.trace_statistics import inspect_routing
from routepack.traces.formats import ModelRouting, convert, load
from routepack.traces.trace_files import load_window


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
def recorded(tmp_path):
    """Responses of SGLang as JSON lines; one sequence in eight has no routes."""
    from routepack.testing import synthetic_batch
    from routepack.traces.formats.stacks.sglang import export

    lines = export(synthetic_batch(num_sequences=24, num_layers=3, num_experts=8, top_k=2, max_length=40))
    for number, line in enumerate(lines):
        if number % 8 == 3:
            del line["meta_info"]["routed_experts"]
    plain = [{name: value.tolist() if hasattr(value, "tolist") else value for name, value in line.items()} for line in lines]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, plain)))
    return tmp_path / "rollouts.jsonl"


SHAPE = ("--num-experts", 8, "--top-k", 2, "--num-layers", 3)


def test_convert_writes_a_trace_and_says_what_it_found(routepack, recorded):
    out = recorded.parent / "trace.safetensors"
    code, stdout, _ = routepack("convert", "--from", "sglang", recorded, out, *SHAPE)
    assert code == 0
    assert "24, 3 without routes" in stdout
    assert "coverage" in stdout
    assert load_window(out).num_sequences == 24


def test_convert_reads_the_model_s_config(routepack, recorded):
    (recorded.parent / "config.json").write_text(
        json.dumps({"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3})
    )
    out = recorded.parent / "trace.safetensors"
    code, stdout, _ = routepack(
        "convert", "--from", "sglang", recorded, out, "--model-config", recorded.parent / "config.json", "--json"
    )
    figures = json.loads(stdout)
    assert (code, figures["num_sequences"], figures["without_routes"]) == (0, 24, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-experts", 4, "--top-k", 2, "--num-layers", 3), "are these physical ids"),
        (("--num-experts", 8), "num_layers and top_k"),
        ((), "give num_experts"),
        ((*SHAPE, "--policy", "loose"), "policy='loose'"),
        ((*SHAPE, "--moe-layers", "0-x"), "names layers as in 1-26,28"),
        ((*SHAPE, "--moe-layers", "0,0"), "must name each MoE layer once"),
        ((*SHAPE, "--require"), "3 of 24 sequences have no recorded routes"),
        ((*SHAPE, "--veomni"), "--veomni is for --from verl"),
    ],
)
def test_convert_ends_with_1_and_leaves_what_was_there(routepack, recorded, options, message):
    out = recorded.parent / "trace.safetensors"
    out.write_bytes(b"before")
    code, _, err = routepack("convert", "--from", "sglang", recorded, out, *options)
    assert (code, out.read_bytes()) == (1, b"before")
    assert message in err


def test_convert_lenient_masks_counts_and_reports(routepack, recorded):
    out = recorded.parent / "trace.safetensors"
    lenient = ("--num-experts", 7, "--top-k", 2, "--num-layers", 3, "--policy", "lenient", "--max-missing-share", 1.0)
    code, stdout, _ = routepack("convert", "--from", "sglang", recorded, out, *lenient)
    assert code == 0
    assert "id not below num_experts" in stdout
    assert "they look physical" in stdout
    assert load_window(out).valid_T.any()


def lost_rows(lengths, num_rows, lost, *, experts=8):
    """Arrays of sequences of *lengths* with *num_rows* rows each; those numbered *lost* are -1."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((sum(num_rows), 3, experts)), axis=-1)[..., :2].astype(np.int32)
    ids[lost] = -1
    return {"routed_experts": ids, "cu_seqlens": np.cumsum([0, *num_rows]), "num_tokens": np.asarray(lengths)}


@pytest.mark.parametrize(
    ("lengths", "num_rows", "lost", "share"),
    [
        ([5, 7], [5, 7], [], (12, 12)),
        ([5, 7], [4, 6], [], (10, 10)),
        ([5, 7], [5, 6], [], (11, 11)),
        ([5, 7], [5, 7], [2], (11, 12)),
        ([5, 7], [5, 7], [4], (11, 11)),
        ([5, 7], [5, 7], [3, 4], (10, 11)),
        ([5, 7], [0, 7], [], (7, 11)),
        ([1, 7], [0, 6], [], (6, 6)),
        ([1, 7], [1, 7], [], (8, 8)),
    ],
)
def test_coverage_is_1_where_no_row_was_lost_and_inspect_says_the_same(tmp_path, lengths, num_rows, lost, share):
    np.savez(tmp_path / "rows.npz", **lost_rows(lengths, num_rows, lost))
    report = convert("arrays", tmp_path / "rows.npz", tmp_path / "t.safetensors", ModelRouting(num_experts=8)).report
    assert (report.num_valid_rows, report.num_expected_rows) == share
    found = inspect_routing(load_window(tmp_path / "t.safetensors")).coverage
    assert (found.recorded_rows, found.fed_tokens) == share
    assert report.coverage == found.share
    assert (found.share == 1) == (found.missing_sequences + found.partial_sequences == 0)


def test_a_demand_says_of_whole_sequences_what_its_trace_says():
    batch = load("arrays", lost_rows([1, 5, 7], [0, 5, 6], []), ModelRouting(num_experts=8)).batch
    assert inspect_routing(RoutingDemandCollector(min_coverage=0).collect(batch)).coverage.share == 1


def test_the_longest_reason_stands_apart_from_its_count(routepack, tmp_path):
    ids = lost_rows([9], [9], [])["routed_experts"]
    np.savez(tmp_path / "p.npz", rollout_expert_indices=np.concatenate([ids[:8], ids[7:8]]), cu_seqlens=[0, 9])
    code, stdout, _ = routepack(
        "convert", "--from", "skyrl", tmp_path / "p.npz", tmp_path / "t.safetensors", "--num-experts", 8
    )
    assert (code, re.search(r"last row made up by the stack +1\n", stdout) is not None) == (0, True)
    assert re.search(r"stack {2,}1\n", stdout)
