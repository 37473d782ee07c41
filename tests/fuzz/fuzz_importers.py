"""Coverage-guided fuzzing of every importer, for as long as it is given.

    python tests/fuzz/fuzz_importers.py vllm --seconds 120
    python tests/fuzz/fuzz_importers.py --list

An input makes a small window, spoils rows of it, puts it into the stack's form, and then may replace any part of that form
by something else: a number, a text, bytes, nested lists, a hostile shape, a deleted key. The import must end in a batch
or in a RoutePackError. Of a batch, every row that counts must be a route (K different experts below E); unless the form
itself was tampered with, it must be the row that was delivered at that place, and every good row that was delivered must
count, but for those that the stack's convention takes for filler. The collector must count it just so.

Needs atheris (``pip install atheris``), which no other part of RoutePack does. Prints how many inputs ran and how they ended.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import random
import sys
import time
import zipfile
from pathlib import Path

import atheris
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
BLIND = "--blind" in sys.argv
with (
    contextlib.nullcontext()
    if BLIND
    else atheris.instrument_imports(include=["routepack.formats"], exclude=["routepack.formats._kernels"])
):
    import forms

    from routepack import formats
    from routepack.components.collector import RoutingDemandCollector
    from routepack.errors import RoutePackError
    from routepack.formats import ImportOptions, ModelRouting
    from routepack.formats import _kernels as _compiled  # noqa: F401
    from routepack.formats.sources import open_source

    for module in set(formats.STACKS.values()):
        formats.stack_module(next(name for name, home in formats.STACKS.items() if home == module))

EXPERTS = (2, 3, 16, 127, 128, 129, 256, 257, 300)
FILES = ("npz", "jsonl", "safetensors")
FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
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


class Tampered(Exception):
    """The form was changed, so that nothing is known of what it should give."""


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


def looks_filled(ids, row, top_k):
    """Whether the convention of some stack could take this row for filler."""
    one = ids[row].tolist()
    counts = all(layer == list(range(top_k)) for layer in one)
    ramp = ids[row].reshape(-1).tolist() == list(range(ids[row].size))
    copy = row > 0 and one == ids[row - 1].tolist()
    return counts or ramp or copy or not ids[row].any()


def check(result, window, form, is_tampered, layers):
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
        good = is_route(delivered[t][kept].tolist(), batch.num_experts)
        if good and not valid[t]:
            made_up = looks_filled(delivered, t, batch.top_k) or (last and form.startswith("nemo"))
            telling = len(kept) * math.log2(math.perm(batch.num_experts, batch.top_k)) >= 64
            # A top-1 model's zero rows may be routes to expert 0 or none; the stacks that leave zeros get them masked.
            unsure = batch.top_k == 1 and not delivered[t].any()
            assert unsure or (made_up and (last or telling)), (
                f"row {t} of sequence {s}, {delivered[t].tolist()}, was not counted"
            )


def one_input(form):
    stack = formats.stack_module(forms.STACK_OF[form])

    def run(raw):
        data = atheris.FuzzedDataProvider(raw)
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
    check(result, window, form, is_tampered, None)


def file_input(kind):
    """A good file of that kind with bytes changed, cut off or put in; read, and imported as plain arrays."""
    path = FOLDER / f"routepack-fuzz-{os.getpid()}.{kind}"
    good = good_file(kind, path)
    load, model = formats.stack_module("arrays").load, ModelRouting(num_experts=16, top_k=2)

    def run(raw):
        data = atheris.FuzzedDataProvider(raw)
        COUNTS["inputs"] += 1
        content = bytearray(good)
        for _ in range(data.ConsumeIntInRange(1, 4)):
            place, change = data.ConsumeIntInRange(0, len(content)), data.ConsumeIntInRange(0, 3)
            if change == 0:
                del content[place:]
            elif change == 1:
                content[place : place + 1] = data.ConsumeBytes(1)
            elif change == 2:
                content[place : place + 8] = data.ConsumeBytes(8)
            else:
                content[place:place] = data.ConsumeBytes(data.ConsumeIntInRange(0, 20))
        path.write_bytes(content)
        finish(
            lambda: load(open_source(path), model, options=ImportOptions(policy="lenient", max_missing_share=1.0)),
            None,
            kind,
            True,
        )

    return run


def good_file(kind, path):
    ids = np.arange(9 * 2 * 2).reshape(9, 2, 2) % 16
    arrays = {"routed_experts": ids.astype(np.uint8), "cu_seqlens": np.array([0, 4, 9]), "num_tokens": np.array([5, 6])}
    if kind == "npz":
        with zipfile.ZipFile(path, "w") as archive:
            for number, (name, array) in enumerate(arrays.items()):
                with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as member:
                    np.lib.format.write_array(member, array)
                archive.infolist()[number].compress_type = zipfile.ZIP_STORED
    elif kind == "safetensors":
        from safetensors.numpy import save_file

        save_file(arrays, path)
    else:
        records = [
            {"num_tokens": 5, "routed_experts": ids[:4].tolist()},
            {"token_ids": [1, 2, 3], "routed_experts": ids[:2].tolist()},
        ]
        path.write_text("\n".join(map(json.dumps, records)))
    return path.read_bytes()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", nargs="?", choices=(*forms.NAMES, *FILES))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blind", action="store_true", help="Random inputs without coverage: several times as many a second.")
    parser.add_argument("--corpus", type=Path, help="A folder of inputs to go on from, which grows.")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list or not arguments.form:
        print(*forms.NAMES, *FILES, sep="\n")
        return
    target = file_input(arguments.form) if arguments.form in FILES else one_input(arguments.form)
    start = time.monotonic()

    def until_time_is_up(raw):
        target(raw)
        done = COUNTS["inputs"] == arguments.runs or (
            COUNTS["inputs"] % 64 == 0 and time.monotonic() - start > arguments.seconds
        )
        if done:
            # libFuzzer leaves without Python's ordinary way out.
            print(json.dumps({"form": arguments.form, "seconds": round(time.monotonic() - start, 1), **COUNTS}), flush=True)
            clean_up()
            os._exit(0)

    if arguments.blind:
        source = random.Random(arguments.seed)
        while True:
            raw = source.randbytes(source.randint(8, 100))
            try:
                until_time_is_up(raw)
            except BaseException:
                print(f"input: {raw.hex()}", flush=True)
                raise
    if arguments.corpus:
        arguments.corpus.mkdir(parents=True, exist_ok=True)
    options = [
        *([str(arguments.corpus)] if arguments.corpus else []),
        "-max_len=160",
        f"-seed={arguments.seed}",
        "-verbosity=0",
        "-rss_limit_mb=4096",
        "-timeout=60",
    ]
    atheris.Setup([sys.argv[0], *options], until_time_is_up)
    atheris.Fuzz()


def clean_up():
    for path in FOLDER.glob(f"routepack-fuzz-{os.getpid()}.*"):
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
