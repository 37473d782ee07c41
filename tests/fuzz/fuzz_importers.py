"""Coverage-guided fuzzing of every importer, for as long as it is given.

    python tests/fuzz/fuzz_importers.py vllm --seconds 120
    python tests/fuzz/fuzz_importers.py --list

An input makes a small window of any dtype that the form takes, spoils rows of it, may deliver it in turns that overlap, differ
or leave a gap, puts it into the stack's form, and then may replace any part of that form by something else: a number, a text,
bytes, nested lists, a hostile shape, a deleted key. The import must end in a batch or in a RoutePackError. Of a batch, every
row that counts must be a route (K different experts below E); unless the form itself was tampered with, it must be the row
that was delivered at that place (of several, the one that the merge policy says), and every good row that was delivered must
count, but for those that the stack's convention takes for filler. The collector must count it just so; a plain loop recounts
every fourth batch. Only inputs that reach an importer are counted.

Needs atheris (``pip install atheris``), which no other part of RoutePack does. Prints how many inputs ran and how they ended.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import time
import zipfile
from pathlib import Path

import atheris
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "traces" / "formats"))
BLIND = "--blind" in sys.argv
with (
    contextlib.nullcontext()
    if BLIND
    else atheris.instrument_imports(include=["routepack.traces.formats"], exclude=["routepack.traces.formats._kernels"])
):
    import forms
    import hostile
    from hostile import COUNTS, finish

    from routepack.traces import formats
    from routepack.traces.formats import ImportOptions, ModelRouting
    from routepack.traces.formats import _kernels as _compiled  # noqa: F401
    from routepack.traces.formats.sources import open_source

    for module in set(formats.STACKS.values()):
        formats.stack_module(next(name for name, home in formats.STACKS.items() if home == module))

FILES = ("npz", "jsonl", "safetensors")
FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")


def file_input(kind):
    """A good file of that kind with bytes changed, cut off or put in; read, and imported as plain arrays."""
    path = FOLDER / f"routepack-fuzz-{os.getpid()}.{kind}"
    good, members = good_file(kind, path), []
    if kind == "npz":
        with zipfile.ZipFile(path) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
    load, model = formats.stack_module("arrays").load, ModelRouting(num_experts=16, top_k=2)

    def run(raw):
        data = atheris.FuzzedDataProvider(raw)
        COUNTS["inputs"] += 1
        # Half of the archives are whole, with right checksums, and hold a spoiled array.
        inside = data.ConsumeIntInRange(0, len(members) - 1) if members and data.ConsumeBool() else None
        content = spoiled(bytearray(good if inside is None else members[inside][1]), data)
        if inside is None:
            path.write_bytes(content)
        else:
            with zipfile.ZipFile(
                path, "w", (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[data.ConsumeIntInRange(0, 1)]
            ) as archive:
                for number, (name, whole) in enumerate(members):
                    archive.writestr(name, bytes(content) if number == inside else whole)
        finish(
            lambda: load(open_source(path), model, options=ImportOptions(policy="lenient", max_missing_share=1.0)),
            None,
            kind,
            True,
        )

    return run


def spoiled(content, data):
    """*content* with up to four changes: cut off, a byte or eight of them replaced, bytes put in."""
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
    return content


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
    parser.add_argument("--seconds", type=float, help="60, unless --runs says when to end")
    parser.add_argument("--runs", type=int, default=-1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blind", action="store_true", help="Random inputs without coverage: several times as many a second.")
    parser.add_argument("--corpus", type=Path, help="A folder of inputs to go on from, which grows.")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list or not arguments.form:
        print(*forms.NAMES, *FILES, sep="\n")
        return
    if arguments.form in FILES:
        target = file_input(arguments.form)
    else:
        one = hostile.one_input(arguments.form)
        target = lambda raw: one(atheris.FuzzedDataProvider(raw))  # noqa: E731
    start = time.monotonic()
    seconds = arguments.seconds or (60.0 if arguments.runs < 0 else float("inf"))

    def until_time_is_up(raw):
        target(raw)
        done = COUNTS["inputs"] == arguments.runs or (COUNTS["inputs"] % 64 == 0 and time.monotonic() - start > seconds)
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
