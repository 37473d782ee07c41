"""The import rules of the house. Rooms are layers, which pyproject.toml lists for import-linter; no files form a circle."""

import ast
import os
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

import routepack

ROOT = Path(routepack.__file__).parent
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
HEAVY = ("torch", "torchtitan", "lightning", "matplotlib", "numba", "scipy", "pandas", "triton")


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("routepack", include_external_packages=True)


def own_imports(graph) -> dict[str, set[str]]:
    """What each file imports of routepack's files, type checking and imports inside functions included."""
    own = {module for module in graph.modules if module.split(".")[0] == "routepack"}
    return {module: graph.find_modules_directly_imported_by(module) & own for module in own}


def importers_of(graph, package: str) -> set[str]:
    """The files that import an external package."""
    return graph.find_modules_that_directly_import(package) if package in graph.modules else set()


def test_rooms_import_only_what_lies_below_them():
    # A process of its own: the linter sets up logging for all of its process.
    code = "import importlinter.cli as linter; raise SystemExit(linter.lint_imports(no_cache=True))"
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT.parents[1], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout


def test_no_files_import_one_another_in_a_circle(graph):
    list(TopologicalSorter(own_imports(graph)).static_order())


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("routepack.planning.search", "routepack.planning.planner"),
        ("routepack.cost.known_models", "routepack.cost.models"),
        ("routepack.traces.formats.records", "routepack.traces.formats.assembler"),
        ("routepack.core.config", "routepack.cli.main"),
    ],
)
def test_a_circle_that_once_was_would_be_seen(graph, importer, imported):
    imports = own_imports(graph)
    assert importer in imports
    assert imported in imports
    with pytest.raises(CycleError):
        list(TopologicalSorter({**imports, importer: imports[importer] | {imported}}).static_order())


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("torchtitan", "routepack.torchtitan."),
        ("lightning", "routepack.integrations.lightning"),
        ("transformers", "routepack.integrations.transformers"),
        ("wandb", "nowhere"),
    ],
)
def test_heavy_packages_stay_where_they_belong(graph, package, allowed):
    assert not [module for module in importers_of(graph, package) if not module.startswith(allowed)]


def test_torch_distributed_is_called_in_few_rooms():
    rooms = {"distributed", "integrations", "torchtitan", "training"}
    users = [path for path in FILES if "torch.distributed" in imports_of(path)]
    assert users
    assert not [path for path in users if path.parts[0] not in rooms]


def test_nobody_prints():
    for path in FILES:
        calls = [node.func for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.Call)]
        assert "print" not in [call.id for call in calls if isinstance(call, ast.Name)], path


def test_no_file_grows_beyond_450_lines():
    assert not [str(path) for path in FILES if len((ROOT / path).read_text().splitlines()) > 450]


def test_the_front_door_stays_small():
    entries = [path for path in ROOT.iterdir() if path.name != "__pycache__" and path.name != "configs"]
    assert len([path for path in entries if path.is_file()]) <= 4
    assert len([path for path in entries if path.is_dir()]) <= 14


def test_import_loads_nothing_heavy():
    code = "import sys, routepack, routepack.cli; print(*[m for m in sys.modules if '.' not in m])"
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout
    assert not set(loaded.split()) & set(HEAVY)


def test_every_public_name_exists():
    for name in routepack.__all__:
        assert getattr(routepack, name) is not None
    with pytest.raises(AttributeError, match="attribute Nothing"):
        _ = routepack.Nothing


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # The MoE layer's folder lifts out under any name; so its files name one another relatively.
            assert node.level == int(path.parts[0] == "triton_kernels" and node.level), f"{path} has a relative import"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names
