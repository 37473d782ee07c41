"""How fast recorded routing is imported, and what memory that takes beyond its source.

    python benchmarks/import.py [--ids 50_000_000] [--forms slime sglang ...]

Every form runs in a process of its own: the source is built, the kernels are compiled on a small piece of it, and the
best of three imports is reported. Peak memory is the growth of the resident set during an import, the largest of three, over
the size of the narrowed ids; a source that is a list of base64 strings is there before and after. The bandwidth beside it is that of a
copy of the same source with numpy, which narrows nothing and judges no row.
"""

import argparse
import json
import subprocess
import sys
import time

import numpy as np
from measuring import described, machine, measured

from routepack.formats import ModelRouting, stack_module
from routepack.formats.payloads import encoded
from routepack.recorded import RolloutBatch

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
    return [
        {tokens: np.zeros(end - first + 1, np.int64), routes: packed[first:end]} for first, end in zip(edges, edges[1:], strict=False)
    ]


def source_of(form, ids):
    """The source, and the stack's loader with its options."""
    dtype = {"vllm": np.uint8, "prime-rl": np.uint8, "skyrl-packed": np.uint8, "verl-jagged": np.int16, "verl-dense": np.int16,
             "nemo-rl-tensor": np.int8, "nemo-rl-envelope": np.int8}.get(form, np.int32)  # fmt: skip
    packed, edges = sequences(ids, dtype)
    stack = form.removesuffix("-jagged").removesuffix("-dense").removesuffix("-tensor").removesuffix("-envelope").removesuffix("-packed")
    load = stack_module(stack).load
    if form in ("vllm", "prime-rl"):
        source = records(packed, edges, "token_ids", "routed_experts")
        if form == "prime-rl":
            source = [r | {"routed_experts": {"data": encoded(r["routed_experts"]), "shape": list(r["routed_experts"].shape), "dtype": "uint8"}} for r in source]  # fmt: skip
    elif form in ("slime", "miles"):
        source = records(packed, edges, "tokens", "rollout_routed_experts")
    elif form == "areal":
        source = [{"input_tokens": [0], "output_tokens": np.zeros(e - f, np.int64), "routed_experts": packed[f:e].reshape(e - f, -1)}
                  for f, e in zip(edges, edges[1:], strict=False)]  # fmt: skip
    elif form == "sglang":
        source = [{"meta_info": {"prompt_tokens": 1, "completion_tokens": int(e - f), "routed_experts": encoded(packed[f:e])}}
                  for f, e in zip(edges, edges[1:], strict=False)]  # fmt: skip
        packed = None
    elif form == "nemo-rl-envelope":
        batch = RolloutBatch(routed_experts_TLK=packed.view(np.uint8), cu_seqlens=edges, num_tokens_S=np.diff(edges) + 1, num_experts=EXPERTS)
        source = stack_module("nemo-rl").export(batch, messages=True)
    elif form in ("verl-dense", "nemo-rl-tensor"):
        lengths, width = np.diff(edges), int(np.diff(edges).max()) + 1
        padded = np.zeros((len(lengths), width, LAYERS, TOP_K), dtype)
        mask = np.zeros((len(lengths), width), bool)
        for s, (first, end) in enumerate(zip(edges, edges[1:], strict=False)):
            begin = width - (end - first) - 1 if form == "verl-dense" else 0
            padded[s, begin : begin + end - first], mask[s, begin : begin + end - first + 1] = packed[first:end], True
        source = {"routed_experts": padded, "attention_mask": mask} if form == "verl-dense" else {"routed_experts": padded, "input_lengths": lengths + 1}  # fmt: skip
    elif form == "verl-jagged":
        source = {"routed_experts": {"values": packed, "offsets": edges}, "num_tokens": np.diff(edges) + 1}
    elif form == "skyrl-packed":
        source = {"rollout_expert_indices": packed, "cu_seqlens": edges, "num_tokens": np.diff(edges) + 1}
    else:
        source = {"routed_experts": packed, "cu_seqlens": edges, "num_tokens": np.diff(edges) + 1}
    return source, load


FORMS = ["slime", "miles", "arrays", "areal", "sglang", "vllm", "prime-rl", "verl-jagged", "verl-dense", "nemo-rl-tensor",
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
        narrowed = imported.batch.routed_experts_TLK.nbytes if imported.report.copied else 0
        size = imported.batch.routed_experts_TLK.nbytes
        runs.append((taken.wall_seconds, (taken.peak_gib - before) * 2**30 / size))
        counted, copied = imported.report.num_valid_rows * LAYERS * TOP_K, narrowed > 0
        del imported
    wide = np.zeros(ids, np.int32 if form in ("slime", "miles", "arrays", "areal", "sglang") else np.int16 if "verl" in form else np.uint8)
    target, copies = np.empty_like(wide), []
    for _ in range(4):
        start = time.perf_counter()
        np.copyto(target, wide)
        copies.append(time.perf_counter() - start)
    print(json.dumps({"form": form, "ids": counted, "dtype": wide.dtype.name, "seconds": min(r[0] for r in runs), "copied": copied,
                      "growth": max(r[1] for r in runs), "copy_seconds": min(copies), "source_bytes": wide.nbytes}))  # fmt: skip


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
