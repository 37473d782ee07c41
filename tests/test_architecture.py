"""The import rules of the house: arrows point one way, and heavy packages stay where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import routepack

ROOT = Path(routepack.__file__).parent
LEVELS = [
    {"errors", "checks", "files", "arrays", "cores"},
    {"recorded", "planned", "types"},
    {"config", "communication", "cost", "steps", "calibration", "flops", "bounds", "trace", "solvers", "formats"},
    {"components"},
    {
        "locality",
        "transition",
        "alternation",
        "planner",
        "warm_up",
        "peers",
        "background",
        "layout",
        "materialize",
        "minibatches",
        "verification",
        "metrics",
        "report",
        "inspection",
        "inspection_text",
        "inspect_command",
        "outlook",
        "assembly",
        "distributed",
        "gathering",
        "sequence_exchange",
        "row_exchange",
        "testing",
    },
    {"cli", "integrations", "__init__", "__main__"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
HEAVY = ("torch", "torchtitan", "lightning", "matplotlib", "numba", "scipy", "pandas", "triton")


def imports_of(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names += [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def top_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def uses(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imports_of(path))


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_arrows_never_turn_back(path):
    if top_of(path) == "triton_kernels":
        assert not [name for name in imports_of(path) if name.startswith("routepack.") and "triton_kernels" not in name]
        return
    own = LEVEL_OF[top_of(path)]
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "routepack" and len(parts) > 1 and (ROOT / parts[1]).is_dir() | (ROOT / f"{parts[1]}.py").exists():
            assert parts[1] == "triton_kernels" or LEVEL_OF[parts[1]] <= own, f"{path} must not import {name}"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("torch.distributed", ("distributed.py", "integrations/")),
        ("torchtitan", ("integrations/torchtitan/",)),
        ("lightning", ("integrations/lightning.py",)),
        ("transformers", ("integrations/transformers.py",)),
        ("wandb", ()),
    ],
)
def test_heavy_packages_stay_where_they_belong(package, allowed):
    users = [str(path) for path in MODULES if uses(path, package)]
    assert not [path for path in users if not path.startswith(allowed)]


def test_nobody_prints():
    for path in MODULES:
        calls = [node.func for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Call)]
        assert "print" not in [call.id for call in calls if isinstance(call, ast.Name)], path


def test_no_file_grows_beyond_450_lines():
    assert not [str(path) for path in MODULES if len((ROOT / path).read_text().splitlines()) > 450]


def test_import_loads_nothing_heavy():
    code = "import sys, routepack, routepack.cli.main; print(*[m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()).stdout
    assert not set(loaded.split()) & set(HEAVY)


def test_every_public_name_exists():
    for name in routepack.__all__:
        assert getattr(routepack, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = routepack.Nothing


def _environment():
    import os

    return os.environ | {"PYTHONPATH": str(ROOT.parent)}
