"""Every cell of the table in cases.py: import it under both policies, and compare what counts with what was routed."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import TraceError
from routepack.core.rollouts import id_dtype
from routepack.traces import formats
from routepack.traces.formats import ImportOptions

HERE = Path(__file__).parent


def load_module(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


forms, cases = load_module("forms"), load_module("cases")
CELLS = [(case, form) for case in cases.CASES for form in forms.NAMES if case.expected(form) != "-"]


def imported(form, scene, **options):
    dtypes = scene.options.get("dtypes")
    source, extra = forms.build(form, scene.window)
    if dtypes:
        source = retyped(form, scene.window, dtypes)
    module = formats.stack_module(forms.STACK_OF[form])
    return module.load(source, scene.window.routing(), options=ImportOptions(**options), **extra)


def retyped(form, window, dtypes):
    """Each sequence's record as it comes out of a window of its own dtype."""
    records = []
    for s, dtype in enumerate(dtypes):
        signed = np.dtype(dtype.__name__.removeprefix("u")) if form == "nemo-rl-envelope" and dtype is not np.uint8 else dtype
        signed = np.int16 if form == "nemo-rl-envelope" and dtype is np.uint8 else signed
        one = forms.Window(ids=[window.ids[s]], tokens=[window.tokens[s]], num_experts=window.num_experts, dtype=signed)
        records += forms.build(form, one)[0]
    return records


def routed(batch, sequence):
    """Row to ids of the rows that count."""
    first, end = batch.cu_seqlens[sequence : sequence + 2]
    valid = np.ones(end - first, bool) if batch.valid_T is None else batch.valid_T[first:end]
    return {int(row): batch.routed_experts_TLK[first + row].tolist() for row in np.flatnonzero(valid)}


def plain(rows):
    return {row: np.asarray(ids).tolist() for row, ids in rows.items()}


def check_others(batch, scene):
    """The other sequences are whole, however the middle one is treated."""
    for s in (0, 2):
        if scene.window.ids[s] is not None and scene.window.turns is None and not scene.drops:
            assert set(routed(batch, s)) >= set(range(min(len(scene.window.ids[s]), batch.num_tokens_S[s] - 1)))


def check_counts(batch):
    """The collector counts each valid row top_k times, and nothing else: recounted one id at a time."""
    if not any(routed(batch, s) for s in range(3)):
        return
    demand = RoutingDemandCollector(min_coverage=0.0).collect(batch)
    for s in range(3):
        counts = np.zeros((batch.num_layers, batch.num_experts), int)
        for ids in routed(batch, s).values():
            for layer, row in enumerate(ids):
                for expert in row:
                    counts[layer, expert] += 1
        assert (demand.tokens_SLE[s] == counts).all()


@pytest.mark.parametrize(("case", "form"), CELLS, ids=[f"{case.title}-{form}".replace(" ", "_") for case, form in CELLS])
def test_cell(case, form):
    outcome, scene = case.expected(form), case.make(form)
    if outcome in ("refused", "error"):
        with pytest.raises(TraceError, match=case.message) as strict:
            imported(form, scene)
        assert outcome == "error" or re.search(
            "(sequence|response) [01]|rows are no routes|3 of 3 sequences", str(strict.value)
        )
        if outcome == "error":
            with pytest.raises(TraceError, match=case.message):
                imported(form, scene, policy="lenient")
            return
        results = [imported(form, scene, policy="lenient")]
        assert results[0].report.problems or results[0].report.suspicious or results[0].report.masked_rows
    else:
        results = [imported(form, scene), imported(form, scene, policy="lenient")]
        assert not results[1].report.problems
    wanted = scene.kept if outcome == "kept" and scene.kept is not None else scene.good
    for result in results:
        assert routed(result.batch, cases.WRONG) == plain(wanted)
        assert result.batch.routed_experts_TLK.dtype == id_dtype(scene.window.num_experts) or not result.report.copied
        check_counts(result.batch)
        if case.title not in ("three quarters of the rows lost", "no sequence has routes", "a turn starts beyond its tokens"):
            check_others(result.batch, scene)


def test_the_table_in_the_docs_is_the_one_tested():
    page = (HERE.parents[2] / "docs/formats.md").read_text()
    assert cases.rewritten(page) == page, "run: python tests/traces/formats/cases.py docs/formats.md"


def test_every_stack_is_in_the_table():
    assert {formats.STACKS[forms.STACK_OF[name]] for name in forms.NAMES} == set(formats.STACKS.values())


def test_most_cells_hold_something():
    cells = len(cases.CASES) * len(forms.NAMES)
    assert cells - len(CELLS) < cells * 0.3


@pytest.mark.parametrize("form", forms.NAMES)
def test_only_real_rows_take_memory(form):
    """verl#6211, SkyRL#2235: padding is no part of a batch."""
    scene = cases.CASES[0].make(form)
    batch = imported(form, scene).batch
    rows = sum(scene.window.tokens)
    assert rows - 3 <= len(batch.routed_experts_TLK) <= rows
    assert (
        batch.routed_experts_TLK.nbytes
        == len(batch.routed_experts_TLK) * cases.LAYERS * cases.TOP_K * batch.routed_experts_TLK.itemsize
    )


@pytest.mark.parametrize("form", ["vllm", "sglang", "slime", "miles", "prime-rl", "nemo-rl-envelope", "areal"])
@pytest.mark.parametrize("merge", ["keep_first", "keep_last"])
def test_the_merge_says_which_of_two_recordings_counts(form, merge):
    """verl#6054: a later turn's routes, of newer weights, replace or do not replace those that sampled the tokens."""
    scene = next(case for case in cases.CASES if case.title == "histories that differ").make(form)
    batch = imported(form, scene, merge=merge).batch
    older, newer = scene.window.turns[cases.WRONG][0][1], scene.window.ids[cases.WRONG]
    assert routed(batch, cases.WRONG)[2] == (older if merge == "keep_first" else newer)[2].tolist()
    assert len(routed(batch, cases.WRONG)) == len(newer)


@pytest.mark.parametrize("form", [name for name in forms.NAMES if name != "megatron"])
def test_repeated_rows_are_reported(form):
    scene = next(case for case in cases.CASES if case.title == "22 equal rows").make(form)
    signs = imported(form, scene).report.suspicious
    assert any(re.search("2[012] equal rows stand in a run, in sequence 1 from row 2 on", sign) for sign in signs)


@pytest.mark.parametrize("form", ["vllm", "slime", "miles", "nemo-rl-envelope", "skyrl-records", "arrays-jsonl"])
def test_nested_lists_are_taken_with_a_note(form):
    """Gym#2089."""
    scene = cases.CASES[0].make(form)
    source, _ = forms.build(form, scene.window)
    for record, ids in zip(source, scene.window.ids, strict=True):
        for name in ("routed_experts", "rollout_routed_experts", "rollout_expert_indices"):
            if name in record:
                record[name] = ids.tolist()
    result = formats.load(forms.STACK_OF[form], source, scene.window.routing())
    assert any("nested lists" in note for note in result.report.notes)
    assert routed(result.batch, 1) == plain(scene.good)


@pytest.mark.parametrize("form", forms.BASE64)
def test_a_payload_that_was_cut_off_is_an_error(form):
    scene = cases.CASES[0].make(form)
    source, _ = forms.build(form, scene.window)
    for cut in (5, 8, 40):
        text = forms.encoded(scene.window.ids[1].astype(np.int32))[:-cut]
        if form == "sglang":
            source[1]["meta_info"]["routed_experts"] = text
        elif form == "prime-rl":
            source[1]["routed_experts"]["data"] = text
        else:
            source[1]["routed_experts"] = source[1]["routed_experts"][:-cut]
        with pytest.raises(TraceError):
            formats.load(
                forms.STACK_OF[form],
                source,
                scene.window.routing(),
                options=ImportOptions(policy="lenient", max_missing_share=1.0),
            )
