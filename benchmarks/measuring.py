"""What a piece of work takes: wall and CPU seconds, peak memory; and the machine that it was measured on."""

import datetime
import os
import platform
import resource
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Taken:
    """What the work took; filled when it is done."""

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of all threads."""
    peak_gib: float = 0.0
    """The process's largest resident memory meanwhile, its inputs and compiled kernels included."""


@contextmanager
def measured():
    """Measure the block; on Linux the peak is the block's own, elsewhere the process's so far."""
    taken = Taken()
    if CLEAR.exists():
        CLEAR.write_text("5")
    wall, cpu = time.perf_counter(), time.process_time()
    yield taken
    taken.wall_seconds, taken.cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
    taken.peak_gib = _peak_kib() / 2**20


def _peak_kib():
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 1024 if platform.system() == "Darwin" else peak


def machine():
    """Date, commit, processor, cores and versions, as every published figure names them."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        **{name: metadata.version(name) for name in ("numpy", "numba")},
        "python": platform.python_version(),
    }


def _processor():
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def described(machine):
    """The machine in one sentence."""
    versions = ", ".join(f"{name} {machine[name]}" for name in ("python", "numpy", "numba"))
    return (
        f"{machine['date']}, commit {machine['commit']}, {machine['processor']}, {machine['cores']} cores "
        f"(load {machine['load']} at the start), {versions}."
    )
