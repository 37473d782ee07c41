"""Hostile windows in every stack's form, and what must hold of their import: for hypothesis and for atheris alike.

*data* is whatever chooses: an object with atheris's ``ConsumeIntInRange``, ``ConsumeBytes``, ``ConsumeInt`` and
``ConsumeUnicodeNoSurrogates``.
"""

import collections
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import forms

from routepack import formats
from routepack.components.collector import RoutingDemandCollector
from routepack.errors import RoutePackError
from routepack.formats import ImportOptions, ModelRouting

EXPERTS = (2, 3, 16, 127, 128, 129, 256, 257, 300)
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


def is_route(row, experts):
    return all(len(set(ids)) == len(ids) and min(ids) >= 0 and max(ids) < experts for ids in row)


def looks_filled(ids, row, top_k, experts):
    """Whether the convention of some stack could take this row for filler."""
    one = ids[row].tolist()
    counts = all(layer == list(range(top_k)) for layer in one)
    ramp = ids[row].reshape(-1).tolist() == [i % experts for i in range(ids[row].size)]
    copy = row > 0 and one == ids[row - 1].tolist()
    return counts or ramp or copy or not ids[row].any()


def check(result, window, form, is_tampered):
    batch, report = result.batch, result.report
    experts, top_k = batch.num_experts, batch.top_k
    valid_T = np.ones(len(batch.routed_experts_TLK), bool) if batch.valid_T is None else batch.valid_T
    rows = batch.routed_experts_TLK.tolist()
    recount = np.zeros((batch.num_sequences, batch.num_layers, experts), np.int64)
    for s in range(batch.num_sequences):
        first, end = int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1])
        for t in range(first, end):
            if valid_T[t]:
                assert is_route(rows[t], experts), f"row {t - first} of sequence {s} counts, and is {rows[t]}"
                for layer, ids in enumerate(rows[t]):
                    recount[s, layer, ids] += 1
        if not is_tampered:
            check_sequence(s, rows[first:end], valid_T[first:end], window, form, report, batch)
    assert int(valid_T.sum()) == report.num_valid_rows
    assert sum(report.masked_rows.values()) == len(valid_T) - report.num_valid_rows
    if valid_T.any() and COUNTS["inputs"] % 4 == 0:
        demand = RoutingDemandCollector(min_coverage=0.0, num_threads=1).collect(batch)
        assert (demand.tokens_SLE == recount).all(), "the collector counts other rows"
        assert int(recount.sum()) == report.num_valid_rows * top_k * batch.num_layers


def check_sequence(s, rows, valid, window, form, report, batch):
    ids, n = window.ids[s], window.tokens[s]
    assert int(batch.num_tokens_S[s]) == n
    delivered = np.zeros((0, 1, 1), int) if ids is None else ids
    if form == "areal" and len(delivered) > n:
        # There, more rows than tokens are histories end to end.
        return
    kept = [layer for layer in range(delivered.shape[1]) if layer not in report.dropped_layers]
    for t, (row, counts) in enumerate(zip(rows, valid.tolist(), strict=True)):
        if counts:
            assert t < len(delivered), f"row {t} of sequence {s} was not delivered"
            assert row == delivered[t][kept].tolist(), f"row {t} of sequence {s} is not what was delivered"
    if len(rows) == 0 or len(delivered) > n or (form == "areal" and len(delivered) > n - 1):
        return
    for t in range(min(len(delivered), len(rows))):
        last = t == n - 1 or (form == "verifiers-nodes" and t in (n - 1, min(forms.PROMPT, n) - 1))
        seen = delivered[:, kept]
        good = is_route(delivered[t][kept].tolist(), batch.num_experts)
        if good and not valid[t]:
            made_up = looks_filled(seen, t, batch.top_k, batch.num_experts) or (last and form.startswith("nemo"))
            telling = len(kept) * math.log2(math.perm(batch.num_experts, batch.top_k)) >= 64
            # A top-1 model's zero rows may be routes to expert 0 or none; the stacks that leave zeros get them masked.
            unsure = batch.top_k == 1 and not delivered[t].any()
            assert unsure or (made_up and (last or telling)), (
                f"row {t} of sequence {s}, {delivered[t].tolist()}, was not counted"
            )


def one_input(form):
    """A function that makes one window of *form* from *data*, imports it and checks the outcome."""
    stack = formats.stack_module(forms.STACK_OF[form])

    def run(data):
        COUNTS["inputs"] += 1
        window = window_of(data)
        options = ImportOptions(
            policy=("strict", "lenient")[data.ConsumeIntInRange(0, 1)], merge=(None, "keep_first", "keep_last")[data.ConsumeIntInRange(0, 2)],
            max_missing_share=1.0, require=data.ConsumeIntInRange(0, 9) == 9,
        )  # fmt: skip
        representable = form != "megatron" and not (form in forms.PADDED and any(i is not None and len(i) > n for i, n in zip(window.ids, window.tokens, strict=True)))  # fmt: skip
        if all(ids is None for ids in window.ids) or not representable:
            if form != "megatron":
                return
            window.ids = [
                np.zeros((0, window.model["num_layers"], window.model["top_k"]), int) if i is None else i for i in window.ids
            ]
            window.tokens = [len(ids) for ids in window.ids]
        # Forms of unsigned numbers cannot hold -1; they hold what it wraps to, which is what such a stack would send.
        wide = window.num_experts > 256 or form not in ("vllm", "prime-rl", "verifiers-nodes")
        window.dtype = np.int32 if wide else np.int16
        source, extra = forms.build(form, window)
        model = window.routing()
        if data.ConsumeIntInRange(0, 3) == 0:
            model = ModelRouting(
                num_experts=window.num_experts, top_k=model.top_k if form in ("areal", "sglang", "arrays-npz") else None
            )
        is_tampered = data.ConsumeIntInRange(0, 1) == 1
        if is_tampered:
            source = tampered(source, data)
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
