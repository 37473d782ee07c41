"""How fast recorded routing is imported, and what memory that takes beyond its source.

    python benchmarks/import.py [--ids 50_000_000] [--forms slime sglang ...]

Every form runs in a process of its own: the source is built, the kernels are compiled on a small piece of it, and the
best of three imports is reported. Peak memory is the growth of the resident set during an import, the largest of three, over
the size of the narrowed ids; the source is there before and after. Beside it stands a copy of as many ids of the source's
dtype with numpy, which narrows nothing and judges no row: what memory bandwidth alone would allow.
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
from measuring import described, machine, measured

from routepack.traces.formats import ModelRouting, stack_module
from routepack.traces.formats.payloads import encoded, envelope

EXPERTS, LAYERS, TOP_K, ROWS = 128, 48, 8, 2000
MODEL = ModelRouting(num_experts=EXPERTS, top_k=TOP_K, num_layers=LAYERS)


def sequences(ids, dtype, seed=0):
    """Rows of distinct experts in *dtype*, one array a sequence of about ROWS rows."""
    rng = np.random.default_rng(seed)
    total = ids // (LAYERS * TOP_K)
    lengths = np.maximum(rng.lognormal(np.log(ROWS), 0.6, max(total // ROWS, 1)), 2)
    edges = np.concatenate([[0], np.round(np.cumsum(lengths) / lengths.sum() * total)]).astype(np.int64)
    packed = np.empty((total, LAYERS, TOP_K), dtype)
    step = 1 << 12
    for first in range(0, total, step):
        rows = min(step, total - first)
        # K different ids: a random first, and random gaps that add up to less than E.
        gaps = rng.integers(1, EXPERTS // TOP_K, (rows, LAYERS, TOP_K))
        packed[first : first + rows] = (rng.integers(0, EXPERTS, (rows, LAYERS, 1)) + np.cumsum(gaps, axis=2)) % EXPERTS
    return packed, edges


def records(packed, edges, tokens, routes):
    return [{tokens: np.zeros(e - f + 1, np.int64), routes: packed[f:e]} for f, e in pairwise(edges)]


def responses(packed, edges):
    """SGLang's, base64 text of flat int32."""
    for f, e in pairwise(edges):
        yield {"meta_info": {"prompt_tokens": 1, "completion_tokens": int(e - f), "routed_experts": encoded(packed[f:e])}}


def payloads(packed, edges):
    """prime-rl's, base64 text."""
    for f, e in pairwise(edges):
        payload = {"data": encoded(packed[f:e]), "shape": [int(e - f), LAYERS, TOP_K], "dtype": packed.dtype.name, "start": 0}
        yield {"num_tokens": int(e - f) + 1, "routed_experts": payload}


def flat(packed, edges):
    """AReaL's, rows of [layers * top_k]."""
    for f, e in pairwise(edges):
        yield {
            "input_tokens": [0],
            "output_tokens": np.zeros(e - f, np.int64),
            "routed_experts": packed[f:e].reshape(e - f, -1),
        }


def envelopes(packed, edges):
    last = np.broadcast_to(np.arange(TOP_K, dtype=packed.dtype), (1, LAYERS, TOP_K))
    for f, e in pairwise(edges):
        yield {"num_tokens": int(e - f) + 1, "routed_experts": envelope(np.concatenate([packed[f:e], last]))}


def padded(packed, edges, left):
    lengths, width = np.diff(edges), int(np.diff(edges).max()) + 1
    ids, mask = np.zeros((len(lengths), width, LAYERS, TOP_K), packed.dtype), np.zeros((len(lengths), width), bool)
    for s, (f, e) in enumerate(pairwise(edges)):
        begin = width - (e - f) - 1 if left else 0
        ids[s, begin : begin + e - f], mask[s, begin : begin + e - f + 1] = packed[f:e], True
    return ids, mask


def source_of(form, ids):
    """The source, and the stack's loader."""
    packed, edges = sequences(ids, DTYPES.get(form, np.int32))
    load, tokens = stack_module(STACKS.get(form, form)).load, np.diff(edges) + 1
    if form in ("slime", "miles"):
        return records(packed, edges, "tokens", "rollout_routed_experts"), load
    if form == "vllm":
        return records(packed, edges, "token_ids", "routed_experts"), load
    streams = {"sglang": responses, "prime-rl": payloads, "areal": flat, "nemo-rl-envelope": envelopes}
    if form in streams:
        return list(streams[form](packed, edges)), load
    if form in ("verl-padded", "nemo-rl-padded"):
        whole, mask = padded(packed, edges, form == "verl-padded")
        return {"routed_experts": whole, "attention_mask": mask} | (
            {} if form == "verl-padded" else {"input_lengths": tokens}
        ), load
    if form == "verl-jagged":
        return {"routed_experts": {"values": packed, "offsets": edges}, "num_tokens": tokens}, load
    name = "rollout_expert_indices" if form == "skyrl-packed" else "routed_experts"
    return {name: packed, "cu_seqlens": edges, "num_tokens": tokens}, load


DTYPES = {
    "vllm": np.uint8, "prime-rl": np.uint8, "skyrl-packed": np.uint8, "verl-jagged": np.int16, "verl-padded": np.int16,
    "nemo-rl-padded": np.int8, "nemo-rl-envelope": np.int8,
}  # fmt: skip
SHAPED = ("verl-jagged", "verl-padded", "nemo-rl-padded", "nemo-rl-envelope", "skyrl-packed")
STACKS = {form: form.rpartition("-")[0] for form in SHAPED}
FORMS = ["slime", "miles", "arrays", "areal", "sglang", "vllm", "prime-rl", "verl-jagged", "verl-padded", "nemo-rl-padded",
         "nemo-rl-envelope", "skyrl-packed"]  # fmt: skip


def one(form, ids):
    small, load = source_of(form, 400_000)
    load(small, MODEL)
    source, load = source_of(form, ids)
    runs = []
    for _ in range(3):
        before = _resident_gib()
        with measured() as taken:
            imported = load(source, MODEL)
        size = imported.batch.routed_experts_TLK.nbytes
        runs.append((taken.wall_seconds, (taken.peak_gib - before) * 2**30 / size))
        counted, copied = imported.report.num_valid_rows * LAYERS * TOP_K, imported.report.copied
        del imported
    wide = np.zeros(ids, DTYPES.get(form, np.int32))
    target, copies = np.ones_like(wide), []
    for _ in range(4):
        start = time.perf_counter()
        np.copyto(target, wide)
        copies.append(time.perf_counter() - start)
    seconds, growth = min(seconds for seconds, _ in runs), max(growth for _, growth in runs)
    figures = {"form": form, "ids": counted, "dtype": wide.dtype.name, "seconds": seconds, "copied": copied, "growth": growth}
    print(json.dumps(figures | {"copy_seconds": min(copies)}))


def _resident_gib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**30


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=lambda text: int(text.replace("_", "")), default=50_000_000)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.forms[0], arguments.ids)
        return
    print(described(machine()))
    row = "{:<17} {:>6} {:>11} {:>8} {:>10} {:>7} {:>14} {:>13}".format
    print(row("form", "source", "ids", "seconds", "ids/s", "copies", "growth / ids", "numpy copy s"))
    for form in arguments.forms:
        command = [sys.executable, __file__, "--one", "--ids", str(arguments.ids), "--forms", form]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        r = json.loads(done.stdout)
        print(row(form, r["dtype"], f"{r['ids']:,}", f"{r['seconds']:.3f}", f"{r['ids'] / r['seconds']:.2e}", int(r["copied"]),
                  f"{r['growth']:.2f}", f"{r['copy_seconds']:.3f}"), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
