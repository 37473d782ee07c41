"""Times other tiles of each kernel on the GPU at hand and writes the best ones; nothing is ever tuned while training.

    python benchmarks/tune_kernels.py --out mine.json                   # on a GPU: minutes
    ROUTEPACK_KERNEL_CONFIGS=mine.json python train.py                  # uses them
    python benchmarks/tune_kernels.py --out mine.json --dry --arch sm_90   # on a CPU: which candidates compile well, no times

A candidate is timed only if it passes the gate's rules (see gate.py), compiled for this architecture without a launch; so what
is written can be shipped. Candidates are ranked by the sum of the kernel's median times over the shapes. The shipped config
is among them, and is replaced only by one that is faster by more than --margin.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from gate import SHARED_LIMIT, violations  # noqa: E402
from moe_cases import SHAPES, Inputs, inputs  # noqa: E402

from routepack.triton_kernels import tile_configs as configs  # noqa: E402
from routepack.triton_kernels.tile_configs import KernelConfig  # noqa: E402

FUNCTION = {kernel: kernel for kernel in configs.KERNELS} | {configs.WEIGHT_GRADIENT_SUM: configs.WEIGHT_GRADIENT}
"""The Triton function of each entry of the table."""
SIZES = {"BM": (64, 128, 256), "BN": (64, 128, 256), "BK": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5)}
MAX_ELEMENTS = 128 * 256
"""Of a tile's accumulators: more do not fit the registers of eight warps."""
TUNED_SHAPES = {configs.LARGE: ("qwen3_30b_a3b", "olmoe"), configs.SMALL: ("qwen3_30b_a3b_small",)}


def candidates(kernel: str, shipped: KernelConfig) -> Iterator[KernelConfig]:
    """The shipped config and its neighbours: every size moved by one step alone, and every pair of tile sizes."""
    yield shipped
    seen = {shipped}
    for BM, BN in product(SIZES["BM"], SIZES["BN"]):
        for name in ("BK", "num_warps", "num_stages"):
            for value in SIZES[name]:
                other = replace(shipped, BM=BM, BN=BN, **{name: value})
                accumulators = 2 if kernel == configs.GATE_UP else 1
                if BM * BN * accumulators <= MAX_ELEMENTS and other not in seen:
                    seen.add(other)
                    yield other


@contextmanager
def using(kernel: str, config: KernelConfig) -> Iterator[None]:
    """Inside the block *kernel* is launched as *config* says, for few rows an expert or many."""
    original = configs.config_for

    def chosen(name: str, arch: str, rows_per_expert: float, itemsize: int = 2) -> KernelConfig:
        return config if name == kernel else original(name, arch, rows_per_expert, itemsize)

    configs.config_for = chosen
    try:
        yield
    finally:
        configs.config_for = original


def examine(arch: str, kernel: str, rows_class: str, options: list[dict[str, int]]) -> list[list[str]]:
    """What speaks against each config, by the gate's rules. Runs in a process of its own, see :func:`rejected`."""
    from launches import compiled_for
    from machine_code import machine_code

    answers = []
    for config in (KernelConfig(**option) for option in options):
        try:
            with using(kernel, config):
                cases = compiled_for(arch, {FUNCTION[kernel]}, classes=(rows_class,), variants=_variants(kernel))
            found = [
                violation
                for made in cases.values()
                for violation in violations(arch, made.kernel, made.constants, machine_code(made.compiled))
            ]
        # A tile that the compiler cannot lower is a candidate less; it says so in many ways.
        except Exception as error:
            found = [f"does not compile: {type(error).__name__}"]
        answers.append(sorted(set(found)))
    return answers


def _variants(kernel: str) -> tuple[str, ...]:
    return ("recomputing",) if kernel == configs.WEIGHT_GRADIENT_SUM else ("tokens", "permuted", "rows")


def rejected(arch: str, kernel: str, rows_class: str, tried: list[KernelConfig]) -> list[list[str]]:
    """:func:`examine` without a GPU's driver in the way."""
    command = [sys.executable, __file__, "--examine", arch, kernel, rows_class]
    given = json.dumps([asdict(config) for config in tried])
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds(kernel: str, config: KernelConfig, given: list[Inputs]) -> float:
    """The sum of the kernel's median launch times, forward and backward, over the inputs."""
    from moe_peers import ours
    from moe_timing import kernel_ms

    total = 0.0
    with using(kernel, config):
        for one in given:
            layer = ours(one)
            total += kernel_ms(lambda layer=layer, one=one: layer.both(one.dout_TD), True)[FUNCTION[kernel]]
    return total * 1e-3


def tune(arguments: argparse.Namespace) -> dict[tuple[str, str, str], KernelConfig]:
    """The best config of each kernel and row class; in a dry run the shipped ones, after the gate's rules were tried."""
    chosen = {}
    for kernel, rows_class in product(arguments.kernels, (configs.LARGE, configs.SMALL)):
        rows = 256.0 if rows_class == configs.LARGE else 1.0
        shipped = configs.config_for(kernel, arguments.arch, rows)
        tried = list(candidates(kernel, shipped))[: arguments.limit]
        against = rejected(arguments.arch, kernel, rows_class, tried)
        good = [config for config, found in zip(tried, against, strict=True) if not found]
        print(f"{arguments.arch} {kernel} {rows_class}: {len(good)} of {len(tried)} candidates pass the gate")
        if against[0]:
            print(f"  the shipped {_short(shipped)} does not: {'; '.join(against[0])}")
        chosen[arguments.arch, kernel, rows_class] = shipped
        # The summing variant is launched by trainers that keep float32 sums; it is tuned with the plain one's shapes.
        if good and not arguments.dry and kernel != configs.WEIGHT_GRADIENT_SUM:
            chosen[arguments.arch, kernel, rows_class] = fastest(kernel, shipped, good, rows_class, arguments.margin)
    return chosen


def fastest(kernel: str, shipped: KernelConfig, good: list[KernelConfig], rows_class: str, margin: float) -> KernelConfig:
    """The fastest of *good* on this GPU."""
    given = [inputs(shape, "zipf", device="cuda") for shape in SHAPES if shape.name in TUNED_SHAPES[rows_class]]
    took = {config: seconds(kernel, config, given) for config in good}
    best = min(took, key=lambda config: took[config])
    for config in sorted(took, key=lambda config: took[config])[:5]:
        mark = " (shipped)" if config == shipped else ""
        print(f"  {took[config] * 1e3:8.3f} ms  {_short(config)}{mark}")
    return best if shipped not in took or took[best] < (1.0 - margin) * took[shipped] else shipped


def _short(config: KernelConfig) -> str:
    return ",".join(str(value) for value in asdict(config).values())


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON for ROUTEPACK_KERNEL_CONFIGS")
    parser.add_argument("--arch", choices=list(SHARED_LIMIT), help="with --dry; otherwise the GPU's own")
    parser.add_argument("--kernels", nargs="+", default=list(configs.KERNELS), choices=configs.KERNELS)
    parser.add_argument("--limit", type=int, default=40, help="candidates of a kernel")
    parser.add_argument("--margin", type=float, default=0.02, help="a new config must be faster by this share")
    parser.add_argument("--dry", action="store_true", help="compile and judge candidates without a GPU, time nothing")
    parser.add_argument("--examine", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    if arguments.examine:
        print(json.dumps(examine(*arguments.examine, json.load(sys.stdin))))
        return
    if arguments.out is None:
        raise SystemExit("tune_kernels: --out is needed: a file for the configs")
    if not arguments.dry:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("tune_kernels: there is no GPU here; --dry judges candidates without one")
        arguments.arch = configs.architecture(torch.device("cuda"))
        if arguments.arch not in SHARED_LIMIT:
            raise SystemExit(f"tune_kernels: {arguments.arch} has no rules in gate.py: add its shared memory limit there")
    elif arguments.arch is None:
        raise SystemExit("tune_kernels: --dry needs --arch")
    configs.write_configs(arguments.out, tune(arguments))
    print(f"configs: {arguments.out}")


if __name__ == "__main__":
    main()
