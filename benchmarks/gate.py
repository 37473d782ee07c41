"""The kernels' quality gate, without a GPU: compiles every kernel with every shipped config and reads the machine code.

    python benchmarks/gate.py                      # what `make gate` runs: every architecture, both Triton versions
    python benchmarks/gate.py --archs sm_90 --kernels down_forward --triton installed
    python benchmarks/gate.py --update             # accept today's registers and instruction counts as the golden ones
    ROUTEPACK_KERNEL_CONFIGS=mine.json python benchmarks/gate.py     # another table through the same gate

Fails where a kernel spills registers or uses a stack, needs more shared memory than the architecture has, misses the matrix
instructions of its generation, loads an operand without asynchronous copies or TMA, stores less than 16 bytes a thread, draws
ptxas warning C7511 (wgmma serialized), or moves by more than a tenth from the golden registers or instructions. float32 is
computed in full precision, without matrix instructions: there only spills and shared memory are judged. A Triton version that
is not installed is put into build/gate by pip.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).with_name("gate_golden.json")
BUILD = ROOT / "build/gate"
VERSIONS = ("3.7.1", "3.6.0")
"""The one that the tests run with, and the one of the machine that the benchmark was prepared for."""
TOLERANCE = 0.10
"""Of registers and instructions, around the golden figures."""

KIB = 1024
SHARED_LIMIT = {"sm_80": 163 * KIB, "sm_90": 227 * KIB, "sm_100": 227 * KIB, "gfx942": 64 * KIB}
"""Bytes of shared memory that a program may have. A compilation does not check it; the launch would fail."""
MATRIX = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCMMA", "gfx942": "MFMA"}
"""The matrix instruction of each generation; an older one would run at a fraction of the speed."""
MATRIX_KERNELS = ("gate_up_forward", "down_forward", "down_backward", "input_gradient", "weight_gradient")
BY_POINTER = ("down_backward", "weight_gradient")
"""Kernels with an operand that is always gathered through pointers, whatever else comes by TMA."""
NARROW_STORES = {"down_backward": 2}
"""Stores of less than 16 bytes that belong there: one score's gradient a row."""


def violations(arch: str, kernel: str, constants: dict[str, Any], code: Any, *, full_precision: bool = False) -> list[str]:
    """What breaks a rule, in words; *code* is a ``machine_code.MachineCode``."""
    found = []
    if code.spilled or code.stack:
        found.append(f"spills: {code.spilled} accesses, {code.stack} bytes of stack")
    if code.shared > SHARED_LIMIT[arch]:
        found.append(f"shared memory {code.shared} > {SHARED_LIMIT[arch]} bytes")
    if any("C7511" in warning for warning in code.warnings):
        found.append("ptxas C7511: wgmma serialized")
    if kernel not in MATRIX_KERNELS or full_precision:
        return found
    if not code.matrix[MATRIX[arch]]:
        found.append(f"no {MATRIX[arch]}")
    if arch == "sm_90" and code.matrix["HMMA"]:
        found.append("HMMA beside HGMMA")
    if arch.startswith("sm"):
        found += _loads_and_stores(kernel, constants, code)
    return found


def _loads_and_stores(kernel: str, constants: dict[str, Any], code: Any) -> list[str]:
    by_tma = [bool(value) for name, value in constants.items() if name.startswith("TMA_")]
    found = []
    if any(by_tma) and not code.tma_loads:
        found.append("no TMA load where one is asked for")
    if (kernel in BY_POINTER or not all(by_tma)) and not code.async_copies:
        found.append("an operand is loaded without asynchronous copies")
    if not code.wide_stores or code.narrow_stores > NARROW_STORES.get(kernel, 0):
        found.append(f"{code.narrow_stores} stores of less than 16 bytes, {code.wide_stores} of 16")
    return found


def moved(code: dict[str, Any], golden: dict[str, int] | None) -> list[str]:
    """How far registers and instructions are from the golden ones, where that is too far."""
    if golden is None:
        return ["no golden figures: accept these with --update"]
    return [
        f"{name} {code[name]}, golden {golden[name]}"
        for name in ("registers", "instructions")
        if abs(code[name] - golden[name]) > TOLERANCE * golden[name]
    ]


def examine(archs: Iterable[str], kernels: Collection[str], variants: Collection[str] | None = None) -> list[dict[str, Any]]:
    """One record for every distinct compilation, on the Triton of this process."""
    import launches
    from machine_code import machine_code

    records = []
    for arch in archs:
        for case, launch in launches.compiled_for(arch, kernels, variants=variants).items():
            code = machine_code(launch.compiled, warnings=arch == "sm_90" and launch.kernel in MATRIX_KERNELS)
            found = violations(arch, launch.kernel, launch.constants, code, full_precision=case.endswith("float32"))
            records.append({"case": f"{arch} {case}", "config": launch.config, **vars(code), "violations": found})
    return records


def run_version(version: str, arguments: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """:func:`examine` in a process of its own, on Triton *version*; gives the version that ran, too."""
    paths = [str(ROOT / "src")]
    if version not in ("installed", _installed_version()):
        paths.insert(0, str(_installed_beside(version)))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
    command = [sys.executable, __file__, "--child", "--archs", *arguments.archs, "--kernels", *arguments.kernels]
    command += ["--variants", *arguments.variants] if arguments.variants else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"gate: Triton {version} failed\n{done.stderr}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["triton"], answer["records"]


def _installed_version() -> str:
    from importlib import metadata

    return metadata.version("triton")


def _installed_beside(version: str) -> Path:
    folder = BUILD / f"triton-{version}"
    if not (folder / "triton").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(folder),
            f"triton=={version}",
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def judge(version: str, records: list[dict[str, Any]], *, whole: bool, update: bool) -> int:
    """Compare with the golden figures, print the table, give the number of failures."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    known = golden.get(version, {})
    if update:
        kept = {} if whole else known
        fresh = {record["case"]: {name: record[name] for name in ("registers", "instructions")} for record in records}
        golden[version] = dict(sorted({**kept, **fresh}.items()))
        GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
        known = golden[version]
    for record in records:
        record["violations"] += moved(record, known.get(record["case"]))
    failures = sum(bool(record["violations"]) for record in records)
    gone = sorted(known.keys() - {record["case"] for record in records}) if whole else []
    print(f"\n### triton {version}\n\n{table(records)}\n")
    for case in gone:
        print(f"{case}: has golden figures and is compiled no more; accept that with --update")
    print(f"triton {version}: {len(records) - failures} passed, {failures + len(gone)} failed")
    return failures + len(gone)


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: one row for each compilation."""
    head = "| architecture | kernel | tile, warps, stages | registers | shared KiB | matrix | LDGSTS | TMA | stores | code | |"
    rows = [head, "|---|---|---|---|---|---|---|---|---|---|---|"]
    for record in records:
        arch, case = record["case"].split(" ", 1)
        matrix = " ".join(f"{count} {name}" for name, count in record["matrix"].items() if count)
        stores = f"{record['wide_stores']}+{record['narrow_stores']}"
        cells = (
            arch, case, record["config"], record["registers"], f"{record['shared'] / KIB:.0f}", matrix, record["async_copies"],
            record["tma_loads"], stores, record["instructions"], "; ".join(record["violations"]) or "ok",
        )  # fmt: skip
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def summary(by_version: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown, versions side by side: the kernels that multiply, for tokens and with x copied first; the published table."""
    versions = list(by_version)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for version, records in by_version.items():
        for record in records:
            if record["case"].split(" ")[1].strip(",") in MATRIX_KERNELS and record["case"].endswith(
                (", tokens", ", permuted")
            ):
                found.setdefault(record["case"], {})[version] = record
    beside = " / ".join(versions)
    rows = [
        "| architecture | kernel, rows an expert, operands | tile, warps, stages | shared KiB | matrix | LDGSTS | TMA "
        f"| registers {beside} | instructions {beside} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, records in found.items():
        first = next(iter(records.values()))
        matrix = " ".join(f"{count} {name}" for name, count in first["matrix"].items() if count)
        figures = (
            " / ".join(str(records[version][name]) if version in records else "-" for version in versions)
            for name in ("registers", "instructions")
        )
        cells = (
            *case.split(" ", 1), first["config"], f"{first['shared'] / KIB:.0f}", matrix, first["async_copies"],
            first["tma_loads"], *figures,
        )  # fmt: skip
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = (*MATRIX_KERNELS, "tile_map", "combine", "zero_tail")
    parser.add_argument("--archs", nargs="+", default=list(SHARED_LIMIT), choices=list(SHARED_LIMIT))
    parser.add_argument("--kernels", nargs="+", default=list(every), choices=every)
    parser.add_argument("--variants", nargs="+", help="some operand paths, by their names in launches.py")
    parser.add_argument("--triton", nargs="+", default=list(VERSIONS), help="versions; 'installed': this process's")
    parser.add_argument("--summary", type=Path, help="also write the table of benchmarks/README.md to this file")
    parser.add_argument("--update", action="store_true", help="write the golden figures instead of comparing with them")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    if arguments.child:
        import triton

        print(
            json.dumps(
                {"triton": triton.__version__, "records": examine(arguments.archs, arguments.kernels, arguments.variants)}
            )
        )
        return
    every = parsed([])
    whole = (arguments.archs, arguments.kernels, arguments.variants) == (every.archs, every.kernels, every.variants)
    failures, by_version = 0, {}
    for wanted in arguments.triton:
        version, records = run_version(wanted, arguments)
        failures += judge(version, records, whole=whole, update=arguments.update)
        by_version[version] = records
    if arguments.summary:
        arguments.summary.write_text(summary(by_version) + "\n")
    sys.exit(min(failures, 1))


if __name__ == "__main__":
    main()
