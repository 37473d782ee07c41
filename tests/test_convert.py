"""``routepack convert``: what it writes, says and refuses."""

import json

import pytest

from routepack.cli import app, main
from routepack.trace import load_window


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
    from routepack.formats.sglang import export
    from routepack.testing import synthetic_batch

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
