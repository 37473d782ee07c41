"""Hostile windows in every stack's form, and what must hold of their import: for hypothesis and for atheris alike.

*data* is whatever chooses: an object with atheris's ``ConsumeIntInRange``, ``ConsumeBool``, ``ConsumeBytes``, ``ConsumeInt``
and ``ConsumeUnicodeNoSurrogates``.
"""

import collections
import math
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import forms

from routepack.components.routing_demand_collector import RoutingDemandCollector
from routepack.core.errors import RoutePackError
from routepack.traces import formats
from routepack.traces.formats import ImportOptions, ModelRouting

EXPERTS = (2, 3, 16, 127, 128, 129, 256, 257, 300)
SIGNED, UNSIGNED = (np.int8, np.int16, np.int32, np.int64), (np.uint8, np.uint16)
FITTING = {
    (experts, is_any): [dtype for dtype in (UNSIGNED if is_any else ()) + SIGNED if experts - 1 <= np.iinfo(dtype).max]
    for experts in EXPERTS
    for is_any in (False, True)
}
TAKES_UNSIGNED = ("vllm", "sglang", "prime-rl", "verifiers-nodes", "skyrl-padded", "skyrl-records", "arrays-npz")
TURNS = ("vllm", "sglang", "slime", "miles", "nemo-rl-envelope", "prime-rl")
COUNTS = collections.Counter()
WEIRD = [
    None, -1, 0, 1, 2**70, -(2**70), 1.5, float("nan"), True, "", "text", "AAAA", "nrlre1:int16:1x1x1:AAA=", "nrlre1:int8:9999999999x9x9:",
    b"", b"\0\1\2", [], {}, [[]], [[[0]]], [[[0, 1]], [[2]]], [None], ["x"], [[[1.5]]], [[[2**70]]], {"data": "", "shape": [0, 1, 1], "dtype": "uint8"},
    {"data": "AAAA", "shape": [10**12, 10**12, 10**12], "dtype": "uint8"}, {"data": b"123", "shape": [-3, -1, 1], "dtype": "int8"},
    {"data": "AAAA", "shape": [3, 1, 1], "dtype": "object"}, {"data": "AA=A", "shape": [3, 1, 1]}, {"data": 3}, {"values": [1], "offsets": [0, 9]},
    {"values": [[[1]]], "offsets": [0, 5, 2]}, {"shape": [1, 1, 1]}, np.empty((0, 2, 2), np.int8), np.zeros((3, 0, 2), np.int8),
    np.array([object()]), np.array(5), np.zeros((2, 2)), np.array([[[1, 2]]], np.uint64) + np.uint64(2**63), np.zeros((2, 2, 2, 2), np.int8),
    np.array(["a"]), np.array([1 + 2j]), np.array([np.datetime64("2020-01-01")]), np.zeros((1, 1, 1), bool), np.array([[[1, 0]]], ">i4"),
]  # fmt: skip


def window_of(data):
    experts, top_k, layers = EXPERTS[data.ConsumeIntInRange(0, 8)], data.ConsumeIntInRange(1, 3), data.ConsumeIntInRange(1, 3)
    top_k = min(top_k, experts)
    tokens = [data.ConsumeIntInRange(1, 7) for _ in range(data.ConsumeIntInRange(1, 2))]
    window = forms.Window(ids=[], tokens=tokens, num_experts=experts, model={"top_k": top_k, "num_layers": layers})
    for n in tokens:
        kind = data.ConsumeIntInRange(0, 15)
        rows = {0: None, 1: 0, 2: n, 3: max(n - 3, 0), 4: n + 2, 5: n}.get(kind, n - 1)
        if rows is None:
            window.ids.append(None)
            continue
        first = (
            np.frombuffer(data.ConsumeBytes(rows * layers).ljust(rows * layers, b"\5"), np.uint8)
            .reshape(rows, layers, 1)
            .astype(np.int64)
        )
        stride = 1 if experts < 5 else 1 + data.ConsumeIntInRange(0, (experts - 1) // top_k - 1)
        ids = (first * 7 + np.arange(top_k) * stride) % experts
        for _ in range(data.ConsumeIntInRange(0, 3) if rows else 0):
            spoil(ids, data, experts)
        window.ids.append(ids)
    return window


def spoil(ids, data, experts):
    row = data.ConsumeIntInRange(0, len(ids) - 1)
    kind = data.ConsumeIntInRange(0, 7)
    if kind == 0:
        ids[row] = 0
    elif kind == 1:
        ids[row] = -1
    elif kind == 2:
        ids[row] = np.arange(ids.shape[2])
    elif kind == 3:
        ids[row] = ids[row - 1]
    elif kind == 4:
        ids[row, 0, 0] = -1
    elif kind == 5:
        ids[row, -1, -1] = experts + data.ConsumeIntInRange(0, 3)
    elif kind == 6:
        ids[row, 0] = ids[row, 0, 0]
    else:
        ids[row:] = 0


def change(ids, data, experts):
    """Perhaps make a row another route, or none."""
    kind = data.ConsumeIntInRange(0, 3) if len(ids) else 0
    if kind == 1:
        spoil(ids, data, experts)
    elif kind > 1:
        row = data.ConsumeIntInRange(0, len(ids) - 1)
        ids[row] = (ids[row] + 1) % experts


def take_histories(window, data):
    """Deliver every sequence as AReaL does after an interrupt: a history up to some token, then the whole one."""
    window.turns = []
    for ids, n in zip(window.ids, window.tokens, strict=True):
        first = ids[: data.ConsumeIntInRange(min(forms.PROMPT, n) - 1, n - 1)].copy()
        change(first, data, window.num_experts)
        first = first.astype(window.dtype).astype(np.int64)
        window.turns.append([(0, first, len(first) + 1), (0, ids.astype(window.dtype).astype(np.int64), n)])


def take_turns(window, data):
    """Deliver every sequence in turns that overlap, or leave a gap, and of which later ones may have recorded other rows."""
    window.turns = []
    for ids, n in zip(window.ids, window.tokens, strict=True):
        turns, start = [], 0
        for _ in range(data.ConsumeIntInRange(1, 3)):
            end = data.ConsumeIntInRange(min(start, len(ids)), len(ids))
            part = ids[start:end].copy()
            change(part, data, window.num_experts)
            turns.append((start, part.astype(window.dtype).astype(np.int64), min(end + 1, n)))
            start = max(0, end + data.ConsumeIntInRange(-3, 1))
        # The last turn tells how many tokens there are.
        window.turns.append([*turns[:-1], (*turns[-1][:2], n)])


def tampered(source, data):
    """*source* with one part of it replaced or taken out."""
    place, key = source, None
    for _ in range(5):
        keys = list(place) if isinstance(place, dict) else range(len(place)) if isinstance(place, list) else ()
        if not len(keys):
            break
        parent, key = place, keys[data.ConsumeIntInRange(0, len(keys) - 1)]
        place = parent[key]
        if data.ConsumeIntInRange(0, 2) == 0:
            break
    if key is None:
        return WEIRD[data.ConsumeIntInRange(0, len(WEIRD) - 1)]
    kind = data.ConsumeIntInRange(0, 5)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(place, str):
        parent[key] = place[: data.ConsumeIntInRange(0, len(place))] + data.ConsumeUnicodeNoSurrogates(2)
    elif kind == 2 and isinstance(place, np.ndarray):
        parent[key] = place[: data.ConsumeIntInRange(0, len(place) if place.ndim else 0)] if place.ndim else place
    elif kind == 3 and isinstance(place, int):
        parent[key] = data.ConsumeInt(8)
    else:
        parent[key] = WEIRD[data.ConsumeIntInRange(0, len(WEIRD) - 1)]
    return source


def routes_of(ids_TLK, experts):
    """bool [T]: the rows of K different experts below *experts* in every layer."""
    ordered = np.sort(ids_TLK, axis=2)
    good_TL = (ordered[:, :, 0] >= 0) & (ordered[:, :, -1] < experts)
    if ids_TLK.shape[2] > 1:
        good_TL &= (ordered[:, :, 1:] != ordered[:, :, :-1]).all(axis=2)
    return good_TL.all(axis=1)


def looks_filled(ids, row, top_k, experts):
    """Whether the convention of some stack could take this row for filler."""
    one = ids[row].tolist()
    counts = all(layer == list(range(top_k)) for layer in one)
    ramp = ids[row].reshape(-1).tolist() == [i % experts for i in range(ids[row].size)]
    copy = row > 0 and one == ids[row - 1].tolist()
    return counts or ramp or copy or not ids[row].any()


def check(result, window, form, is_tampered):
    batch, report = result.batch, result.report
    ids_TLK = batch.routed_experts_TLK
    valid_T = np.ones(len(ids_TLK), bool) if batch.valid_T is None else batch.valid_T
    num_valid = int(np.count_nonzero(valid_T))
    if num_valid:
        counted_TLK = ids_TLK[valid_T].astype(np.int64)
        bad_T = ~routes_of(counted_TLK, batch.num_experts)
        assert not bad_T.any(), f"a row that counts is {counted_TLK[bad_T.argmax()].tolist()}"
    if not is_tampered:
        edges = batch.cu_seqlens.tolist()
        for s, (first, end) in enumerate(pairwise(edges)):
            check_one = check_sequence if window.turns is None else check_turns
            check_one(s, ids_TLK[first:end], valid_T[first:end], window, form, report, batch)
    assert num_valid == report.num_valid_rows
    assert sum(report.masked_rows.values()) == len(valid_T) - num_valid
    if num_valid and COUNTS["inputs"] % 4 == 0:
        demand = RoutingDemandCollector(min_coverage=0.0, num_threads=1).collect(batch)
        assert (demand.tokens_SLE == recount(batch, valid_T)).all(), "the collector counts other rows"


def recount(batch, valid_T):
    """Every id of every row that counts, one by one."""
    rows, tokens_SLE = (
        batch.routed_experts_TLK.tolist(),
        np.zeros((batch.num_sequences, batch.num_layers, batch.num_experts), int),
    )
    for s, (first, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        for t in range(first, end):
            for layer, ids in enumerate(rows[t] if valid_T[t] else ()):
                for expert in ids:
                    tokens_SLE[s, layer, expert] += 1
    assert int(tokens_SLE.sum()) == int(valid_T.sum()) * batch.top_k * batch.num_layers
    return tokens_SLE


def check_turns(s, rows, valid, window, form, report, batch):
    """Every row that counts is what some turn delivered for it, and of several routes the one that the policy says."""
    turns, n = window.turns[s], window.tokens[s]
    if form == "areal" and window.merge == "keep_last":
        # There the last history is read alone.
        turns = turns[-1:]
    is_cut = any(start + len(part) > n for start, part, _ in turns)
    for t in range(len(rows)):
        parts = [part[: t - start + 1] for start, part, _ in turns if start <= t < start + len(part)]
        if report.dropped_layers:
            parts = [np.delete(part, report.dropped_layers, axis=1) for part in parts]
        good = [part for part in parts if routes_of(part[-1:], batch.num_experts)[0]]
        if valid[t]:
            assert any((part[-1] == rows[t]).all() for part in good), f"row {t} of sequence {s} was not delivered"
        # What may be filler, or was replaced by a turn that is not in doubt, is judged by check_sequence's inputs.
        sure = [part for part in good if not looks_filled(part, len(part) - 1, batch.top_k, batch.num_experts)]
        if len(sure) == len(good) > 0 and not is_cut and not (form.startswith("nemo") and t == n - 1):
            said = sure[-1 if window.merge == "keep_last" else 0]
            assert valid[t], f"row {t} of sequence {s}, {said[-1].tolist()}, was not counted"
            assert (said[-1] == rows[t]).all(), f"row {t} of sequence {s} is not the one that merge={window.merge} keeps"


def check_sequence(s, rows, valid, window, form, report, batch):
    ids, n = window.ids[s], window.tokens[s]
    assert int(batch.num_tokens_S[s]) == n
    delivered = np.zeros((0, *rows.shape[1:]), int) if ids is None else ids
    if form == "areal" and len(delivered) > n:
        # There, more rows than tokens are histories end to end.
        return
    if report.dropped_layers:
        delivered = np.delete(delivered, [layer for layer in report.dropped_layers if layer < delivered.shape[1]], axis=1)
    both = min(len(delivered), len(rows))
    assert not valid[both:].any(), f"row {both + int(valid[both:].argmax())} of sequence {s} was not delivered"
    # Widened, since an id that wrapped to fit would otherwise wrap here too.
    same = rows[:both].astype(np.int64) == delivered[:both]
    differs = valid[:both] & ~same.all(axis=(1, 2))
    assert not differs.any(), f"row {int(differs.argmax())} of sequence {s} is not what was delivered"
    if len(rows) == 0 or len(delivered) > n or (form == "areal" and len(delivered) > n - 1) or valid[:both].all():
        return
    for t in np.flatnonzero(routes_of(delivered[:both], batch.num_experts) & ~valid[:both]).tolist():
        last = t == n - 1 or (form == "verifiers-nodes" and t in (n - 1, min(forms.PROMPT, n) - 1))
        made_up = looks_filled(delivered, t, batch.top_k, batch.num_experts) or (last and form.startswith("nemo"))
        telling = delivered.shape[1] * math.log2(math.perm(batch.num_experts, batch.top_k)) >= 64
        # A top-1 model's zero rows may be routes to expert 0 or none; the stacks that leave zeros get them masked.
        unsure = batch.top_k == 1 and not delivered[t].any()
        assert unsure or (made_up and (last or telling)), f"row {t} of sequence {s}, {delivered[t].tolist()}, was not counted"


def one_input(form):
    """A function that makes one window of *form* from *data*, imports it and checks the outcome."""
    stack = formats.stack_module(forms.STACK_OF[form])

    def run(data):
        window = window_of(data)
        options = ImportOptions(
            policy=("strict", "lenient")[data.ConsumeIntInRange(0, 1)], merge=(None, "keep_first", "keep_last")[data.ConsumeIntInRange(0, 2)],
            max_missing_share=1.0, require=data.ConsumeIntInRange(0, 9) == 9,
        )  # fmt: skip
        representable = form != "megatron" and not (form in forms.PADDED and any(i is not None and len(i) > n for i, n in zip(window.ids, window.tokens, strict=True)))  # fmt: skip
        if all(ids is None for ids in window.ids) or not representable:
            if form != "megatron":
                COUNTS["not possible in this form"] += 1
                return
            window.ids = [
                np.zeros((0, window.model["num_layers"], window.model["top_k"]), int) if i is None else i for i in window.ids
            ]
            window.tokens = [len(ids) for ids in window.ids]
        fits = FITTING[window.num_experts, form in TAKES_UNSIGNED]
        window.dtype = fits[data.ConsumeIntInRange(0, len(fits) - 1)]
        if form in TURNS and not any(ids is None for ids in window.ids) and data.ConsumeIntInRange(0, 2) == 0:
            take_turns(window, data)
        long_enough = all(ids is not None and len(ids) == n - 1 > 2 for ids, n in zip(window.ids, window.tokens, strict=True))
        if form == "areal" and long_enough and data.ConsumeBool():
            take_histories(window, data)
        # Numbers that the dtype cannot hold arrive as what they wrap to, which may be a route, of expert 255 say.
        window.ids = [None if ids is None else ids.astype(window.dtype).astype(np.int64) for ids in window.ids]
        window.merge = options.merge
        source, extra = forms.build(form, window)
        model = window.routing()
        if data.ConsumeIntInRange(0, 3) == 0:
            model = ModelRouting(
                num_experts=window.num_experts, top_k=model.top_k if form in ("areal", "sglang", "arrays-npz") else None
            )
        is_tampered = data.ConsumeIntInRange(0, 1) == 1
        if is_tampered:
            source = tampered(source, data)
        COUNTS["inputs"] += 1
        finish(lambda: stack.load(source, model, options=options, **extra), window, form, is_tampered)

    return run


def finish(load, window, form, is_tampered):
    try:
        result = load()
    except RoutePackError as error:
        assert str(error), "an error says what to change"
        COUNTS["refused"] += 1
        return
    COUNTS["imported, tampered with" if is_tampered else "imported"] += 1
    check(result, window, form, is_tampered)
