"""The MoE layer on one GPU beside its peers: correctness first, then medians, memory and each kernel's arithmetic a second.

    python benchmarks/kernels_h200.py --out results [--seconds 480]          # needs one NVIDIA GPU; torch 2.11, triton 3.6
    python benchmarks/kernels_h200.py --out results --dry                    # the same paths, small, on a CPU: no figure counts

Each group of implementations runs in a process of its own, so that a peer that crashes or hangs takes nothing with it. Results
are written after every figure: OUT/part_*.json by each process, OUT/kernels.json and OUT/kernels.md of all. An implementation
of ours that failed a check is not timed. What was not measured is listed with the reason. Exits with 0 only if every check was
reached and passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GROUPS = {
    "ours": ("ours", "ours_permuted", "ours_recompute", "grouped_mm"),
    "transformers": ("transformers",),
    "liger": ("liger",),
    "sonic": ("sonic",),
    "liger_autotuned": ("liger_autotuned",),
}
"""Processes, in order, and what each one times."""
SHARE = {"ours": 0.65, "transformers": 0.4, "liger": 0.5, "sonic": 0.6, "liger_autotuned": 1.0}
"""Of the time that is left when a group starts."""
CHECKS_SHARE = 0.45
"""Of a group's time, at most, for correctness."""
AUTOTUNED_SHAPES = ("qwen3_30b_a3b",)
"""Liger's own tuning takes minutes: it is tuned for one shape, and pinned to its default configs for the others."""
PEER_TOLERANCE = 5e-2
"""Of a peer's error, before its time counts: some round intermediate sums to bfloat16."""
SECTIONS = ("checks", "timings", "memory", "kernels", "missing")


class Results:
    """A process's results, written whole after every addition."""

    def __init__(self, path: Path, deadline: float) -> None:
        self.path, self.deadline = path, deadline
        self.content: dict[str, Any] = {section: [] for section in SECTIONS}

    def add(self, section: str, *rows: dict[str, Any]) -> None:
        self.content[section] += rows
        self.write()

    def write(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1))
        temporary.replace(self.path)

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline


def run_group(arguments: argparse.Namespace) -> None:
    """One group, in this process."""
    import torch
    from moe_checks import DRY, GPU, check_all
    from moe_peers import OURS
    from moe_timing import ceilings

    bench = DRY if arguments.dry else GPU
    names = GROUPS[arguments.group]
    results = Results(arguments.out / f"part_{arguments.group}.json", time.monotonic() + arguments.seconds)
    _stop_at(results.deadline + 15.0)
    results.content["machine"] = described_machine(torch)
    results.content["ceilings"] = ceilings(bench.on_gpu)
    results.write()
    started = time.monotonic()
    ours = [name for name in names if name in OURS]
    results.add("checks", *check_all(ours, bench, started + CHECKS_SHARE * arguments.seconds))
    failed = {row["implementation"] for row in results.content["checks"] if row["passed"] is False}
    for name in sorted(failed):
        results.add("missing", {"implementation": name, "reason": "a check failed: not timed"})
    time_all([name for name in names if name not in failed], arguments, results)


def time_all(names: list[str], arguments: argparse.Namespace, results: Results) -> None:
    """Every shape and routing; what the clock does not allow is listed as missing."""
    from moe_cases import SHAPES, inputs, shrunk
    from moe_checks import DRY, GPU

    bench = DRY if arguments.dry else GPU
    wanted = AUTOTUNED_SHAPES if arguments.group == "liger_autotuned" else arguments.shapes
    for shape in (shape for shape in SHAPES if shape.name in wanted):
        for routing in ("balanced", "zipf"):
            given = inputs(
                shrunk(shape, **bench.limits) if arguments.dry else shape, routing, device=bench.device, dtype=bench.dtype
            )
            for name in list(names):
                where = {"shape": shape.name, "routing": routing, "implementation": name}
                if results.out_of_time:
                    results.add("missing", {**where, "reason": "not reached before the deadline"})
                elif not time_one(name, given, where, results, bench.on_gpu):
                    names.remove(name)


def time_one(name: str, given: Any, where: dict[str, str], results: Results, on_gpu: bool) -> bool:
    """Time and memory of one implementation on one input; False where it cannot run here at all."""
    from moe_peers import IMPLEMENTATIONS, OURS, MissingError
    from moe_timing import MODES, kernel_rows, memory, timed

    try:
        layer = IMPLEMENTATIONS[name](given)
    except MissingError as error:
        results.add("missing", {"implementation": name, "reason": str(error)})
        return False
    try:
        if name not in OURS and (error := peer_error(layer, given)) > PEER_TOLERANCE:
            results.add("missing", {**where, "reason": f"differs from ours' specification by {error:.1e}: not timed"})
            return True
        for mode in MODES:
            results.add("timings", {**where, "mode": mode, **timed(layer, given, mode, results.content["ceilings"], on_gpu)})
        results.add("memory", {**where, **memory(layer, given, on_gpu)})
        if name in OURS:
            results.add("kernels", *({**where, **row} for row in kernel_rows(layer, given, on_gpu)))
    except RuntimeError as error:
        if name in OURS:
            raise
        # A peer that fails on this machine is a result, too: out of memory, no kernel for the architecture, ...
        results.add("missing", {**where, "reason": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"})
    return True


def peer_error(layer: Any, given: Any) -> float:
    """How far a peer's output is from plain torch on 512 of the tokens: each token's result is its own."""
    import torch
    from moe_cases import relative_error

    few = slice(0, 512)
    x, ids, scores = given.x_TD[few].detach(), given.ids_TK[few], given.scores_TK[few].detach()
    expected = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(given.shape.num_experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        w1, w3, w2 = (w[expert].detach().float() for w in (given.w1_EFD, given.w3_EFD, given.w2_EDF))
        rows = x[token].float()
        hidden = torch.nn.functional.silu(rows @ w1.T) * (rows @ w3.T)
        expected.index_add_(0, token, hidden @ w2.T * scores[token, choice, None])
    with torch.no_grad():
        return relative_error(layer.forward()[few], expected)


def _stop_at(deadline: float) -> None:
    """End this process soon after *deadline*, whatever it waits for: what it wrote stays."""
    timer = threading.Timer(max(0.0, deadline - time.monotonic()), os._exit, (3,))
    timer.daemon = True
    timer.start()


def described_machine(torch: Any) -> dict[str, Any]:
    """Date, commit, device and versions."""
    commit = "unknown"
    if shutil.which("git"):
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
        commit = head.stdout.strip() or commit
    versions = {}
    for name in ("torch", "triton", "transformers", "liger-kernel", "sonic-moe"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }


def drive(arguments: argparse.Namespace) -> int:
    """All groups, one after another; 0 if every check passed."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.seconds
    ended: dict[str, str] = {}
    for group in arguments.groups:
        left = deadline - time.monotonic()
        if left < 20 and not arguments.dry:
            ended[group] = "not started: no time was left"
        else:
            ended[group] = start_group(group, arguments, left * SHARE[group])
        merged = merge(arguments.out, arguments.groups, ended, dry=arguments.dry)
    print((arguments.out / "kernels.md").read_text())
    whole = bool(merged["checks"]) and all(row["passed"] for row in merged["checks"])
    return 0 if whole and ended.get("ours") == "complete" else 1


def start_group(group: str, arguments: argparse.Namespace, seconds: float) -> str:
    """Run a group as a process; how it ended."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if group == "liger":
        environment["LIGER_FUSED_MOE_AUTOTUNE"] = "0"
    if arguments.dry:
        environment |= {"TRITON_INTERPRET": "1", "LIGER_FUSED_MOE_AUTOTUNE": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--group", group, "--out", str(arguments.out), "--seconds", str(seconds)]
    command += ["--shapes", *arguments.shapes, *(["--dry"] if arguments.dry else [])]
    part = arguments.out / f"part_{group}.json"
    part.unlink(missing_ok=True)
    with (arguments.out / f"log_{group}.txt").open("w") as log:
        try:
            done = subprocess.run(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=seconds + 30, check=False
            )
        except subprocess.TimeoutExpired:
            return "stopped: it hung"
    return {0: "complete", 3: "stopped at its deadline"}.get(done.returncode, f"failed with exit code {done.returncode}")


def merge(out: Path, groups: list[str], ended: dict[str, str], *, dry: bool) -> dict[str, Any]:
    """Put what the processes wrote into one JSON and one page."""
    merged: dict[str, Any] = {"dry": dry, "ended": ended, **{section: [] for section in SECTIONS}}
    for group in groups:
        part = out / f"part_{group}.json"
        if part.exists():
            content = json.loads(part.read_text())
            merged.setdefault("machine", content["machine"])
            merged.setdefault("ceilings", content["ceilings"])
            for section in SECTIONS:
                merged[section] += content[section]
    (out / "kernels.json").write_text(json.dumps(merged, indent=1))
    (out / "kernels.md").write_text(page(merged))
    return merged


def page(merged: dict[str, Any]) -> str:
    """The tables, in Markdown."""
    machine, ceiling = merged.get("machine", {}), merged.get("ceilings", {})
    lines = ["A dry run on a CPU: the paths are tried, no time below means anything.", ""] if merged["dry"] else []
    lines += [", ".join(f"{name} {value}" for name, value in machine.items()) + ".", ""]
    if ceiling:
        lines += [
            f"Ceilings in the same run: dense bfloat16 product {ceiling['flops_per_second'] * 1e-12:.0f} TFLOP/s, "
            f"copy {ceiling['bytes_per_second'] * 1e-12:.2f} TB/s.",
            "",
        ]
    count = {outcome: sum(row["passed"] is outcome for row in merged["checks"]) for outcome in (True, False, None)}
    lines += [f"Checks: {count[True]} passed, {count[False]} failed, {count[None]} not reached.", ""]
    failed = [row for row in merged["checks"] if row["passed"] is False]
    lines += [f"- FAILED {row['implementation']}: {row['check']}: {row['detail']}" for row in failed]
    lines += ["", *timing_table(merged), "", *kernel_table(merged), ""]
    lines += ["Not measured:", ""] if merged["missing"] else []
    lines += [f"- {' '.join(str(v) for k, v in row.items() if k != 'reason')}: {row['reason']}" for row in merged["missing"]]
    lines += ["", *(f"- {group}: {how}" for group, how in merged["ended"].items() if how != "complete")]
    return "\n".join(lines) + "\n"


def timing_table(merged: dict[str, Any]) -> list[str]:
    memory = {(row["shape"], row["routing"], row["implementation"]): row for row in merged["memory"]}
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in merged["timings"]:
        key = (row["shape"], row["routing"], row["implementation"])
        share = f"{row['tflops_per_second']:.0f} TFLOP/s, {row['share_of_floor']:.0%}"
        cells.setdefault(key, {})[row["mode"]] = f"{row['ms']:.2f} ({row['ms_20']:.2f}-{row['ms_80']:.2f}; {share})"
    lines = [
        "Milliseconds: median (20th-80th percentile; arithmetic a second, share of the floor that the ceilings allow).",
        "",
        "| shape | routing | implementation | forward | backward | both | kept bytes/token | peak MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, modes in cells.items():
        kept = memory.get(key, {})
        peak = kept.get("peak_mib")
        size = f"{kept['saved_bytes_per_token']:.0f}" if kept else "-"
        times = " | ".join(modes.get(mode, "-") for mode in ("forward", "backward", "both"))
        lines.append(f"| {' | '.join(key)} | {times} | {size} | {'-' if peak is None else f'{peak:.0f}'} |")
    return lines


def kernel_table(merged: dict[str, Any]) -> list[str]:
    lines = ["| shape | routing | implementation | kernel | ms a launch | TFLOP/s |", "|---|---|---|---|---|---|"]
    for row in merged["kernels"]:
        speed = row["tflops_per_second"]
        cells = (row["shape"], row["routing"], row["implementation"], row["kernel"], f"{row['ms']:.3f}")
        lines.append(f"| {' | '.join(cells)} | {'-' if speed is None else f'{speed:.0f}'} |")
    return lines


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    from moe_cases import SHAPES

    names = [shape.name for shape in SHAPES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=480.0, help="everything ends within this time; a dry run takes longer")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, by Triton's interpreter")
    parser.add_argument("--shapes", nargs="+", default=names, choices=names)
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--group", choices=list(GROUPS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    if arguments.dry and not arguments.group:
        arguments.seconds = max(arguments.seconds, 3_600.0)
    if arguments.group:
        run_group(arguments)
        return
    sys.exit(drive(arguments))


if __name__ == "__main__":
    main()
