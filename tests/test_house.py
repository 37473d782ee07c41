"""The map of the house is drawn from the source, and a commit is checked as `make lint` checks."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = """
[tool.importlinter]
root_package = "cottage"
[[tool.importlinter.contracts]]
name = "The rooms of the cottage"
type = "layers"
exhaustive = true
containers = ["cottage"]
layers = ["roof", "hall | cellar"]
"""


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("house", ROOT / "docs/house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cottage(tmp_path):
    """A project of three rooms, in which the roof stands on the hall."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    files = {"": "A cottage.", "roof/": "Above. All else.", "hall/": "Below.", "cellar/": "Also below."}
    for room, says in files.items():
        (tmp_path / "src/cottage" / room).mkdir(parents=True)
        (tmp_path / "src/cottage" / room / "__init__.py").write_text(f'"""{says}"""\n')
    (tmp_path / "src/cottage/roof/tiles.py").write_text(
        '"""Red tiles, see :mod:`cottage.hall`. New."""\n\nimport cottage.hall\n'
    )
    return tmp_path


def test_the_map_is_what_the_source_says(house):
    assert (ROOT / house.PAGE).read_text() == house.page(), "the map is out of date: run `make house`"


def test_the_map_shows_rooms_files_and_imports(house, cottage):
    page = house.page(cottage)
    assert " 2  roof\n 1  hall   cellar\n" in page
    assert "  1  cellar  .\n  2  hall       .\n  3  roof       x  .\n" in page
    assert "### roof\n\nAbove. 2 files, under 50 lines. Imports hall.\n\n- `tiles.py`: Red tiles, see `cottage.hall`.\n" in page
    assert "### hall\n\nBelow. 1 file, under 50 lines. Imports no other room.\n" in page


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("hall/stairs.py", "import cottage.roof.tiles"),
        ("roof/tiles.py", '"""Green tiles."""\nimport cottage.hall'),
        ("hall/__init__.py", '"""Below."""' + 60 * "\n"),
        ("attic/__init__.py", ""),
    ],
    ids=["arrow", "docstring", "lines", "room"],
)
def test_a_change_of_the_house_changes_the_map(house, cottage, file, text):
    before = house.page(cottage)
    (cottage / "src/cottage" / file).parent.mkdir(exist_ok=True)
    (cottage / "src/cottage" / file).write_text(text)
    assert house.page(cottage) != before


def test_a_commit_is_checked_as_make_lint_checks():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint is not None
    assert [hook["entry"] for hook in hooks] == [line.replace("$(BIN)", ".venv/bin").strip() for line in lint[1].splitlines()]
