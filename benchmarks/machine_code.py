"""What a compiled kernel consists of, read from its disassembly: registers, spills, shared memory, instructions by kind."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True, kw_only=True)
class MachineCode:
    """Figures of one kernel on one architecture."""

    registers: int
    """Registers a thread (on AMD: vector registers, accumulation registers included)."""
    instructions: int
    """Instructions of the kernel."""
    shared: int
    """Bytes of shared memory that a program needs."""
    spilled: int
    """Loads and stores of spilled registers in the code (NVIDIA), or registers spilled (AMD)."""
    stack: int
    """Bytes of stack or scratch a thread."""
    matrix: dict[str, int]
    """Matrix instructions by kind: HGMMA, HMMA, UTCMMA, MFMA."""
    async_copies: int
    """LDGSTS: copies from global into shared memory that registers do not pass."""
    tma_loads: int
    """UTMALDG: loads by the tensor memory accelerator."""
    wide_stores: int
    """Stores to global memory of 16 bytes a thread, TMA's included."""
    narrow_stores: int
    """The others."""
    warnings: tuple[str, ...] = ()
    """What ptxas warned of."""


def machine_code(compiled: Any, *, warnings: bool = True) -> MachineCode:
    """Read a Triton compiled kernel, of either vendor; *warnings* takes another run of ptxas."""
    return _nvidia(compiled, warnings) if "cubin" in compiled.asm else _amd(compiled)


def _nvidia(compiled: Any, warnings: bool) -> MachineCode:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(NVIDIA_TOOLS / "cuobjdump", "-res-usage", cubin)
        sass = _run(NVIDIA_TOOLS / "nvdisasm", "-c", cubin)
        said = ptxas_warnings(compiled.asm["ptx"], Path(folder)) if warnings else ()
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)
    count = Counter(opcode.split(".")[0] for opcode in opcodes)
    stores = [opcode for opcode in opcodes if opcode.split(".")[0] == "STG"]
    wide = sum("128" in opcode for opcode in stores)
    return MachineCode(
        registers=_number(r"REG:(\d+)", usage),
        instructions=len(opcodes),
        shared=compiled.metadata.shared,
        spilled=count["LDL"] + count["STL"],
        stack=_number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
        matrix={
            "HGMMA": count["HGMMA"],
            "HMMA": count["HMMA"],
            "UTCMMA": sum(n for opcode, n in count.items() if re.fullmatch(r"UTC\w*MMA", opcode)),
        },
        async_copies=count["LDGSTS"],
        tma_loads=count["UTMALDG"],
        wide_stores=wide + count["UTMASTG"],
        narrow_stores=len(stores) - wide,
        warnings=said,
    )


def ptxas_warnings(ptx: str, folder: Path) -> tuple[str, ...]:
    """The warnings of ptxas, such as C7511 (wgmma serialized); Triton keeps them to itself."""
    architecture = re.search(r"\.target\s+(sm_\w+)", ptx)
    assert architecture is not None, "PTX without a target"
    # Blackwell needs the newer of the two assemblers that Triton brings.
    newer = NVIDIA_TOOLS / "ptxas-blackwell"
    ptxas = newer if newer.exists() and int(re.sub(r"\D", "", architecture[1])) >= 100 else NVIDIA_TOOLS / "ptxas"
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    said = _run(ptxas, "-v", f"--gpu-name={architecture[1]}", source, "-o", folder / "again.cubin")
    return tuple(line.strip() for line in said.splitlines() if re.search(r"warning|C7511", line))


def _amd(compiled: Any) -> MachineCode:
    text = compiled.asm["amdgcn"]
    opcodes = re.findall(r"^\s+([a-z]\w+)(?:\s|$)", text, re.MULTILINE)
    opcodes = [opcode for opcode in opcodes if re.match(r"[sv]_|ds_|buffer_|global_|flat_|scratch_", opcode)]
    stores = [opcode for opcode in opcodes if re.match(r"(global|buffer|flat)_store", opcode)]
    wide = sum(opcode.endswith("x4") for opcode in stores)
    return MachineCode(
        registers=_number(r"\.vgpr_count:\s*(\d+)", text),
        instructions=len(opcodes),
        shared=compiled.metadata.shared,
        spilled=_number(r"\.vgpr_spill_count:\s*(\d+)", text),
        stack=_number(r"\.private_segment_fixed_size:\s*(\d+)", text),
        matrix={"MFMA": sum(opcode.startswith("v_mfma") for opcode in opcodes)},
        async_copies=0,
        tma_loads=0,
        wide_stores=wide,
        narrow_stores=len(stores) - wide,
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern} in {text[:500]!r}")
    return int(found[1])


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr[:500]}")
    return done.stdout + done.stderr
