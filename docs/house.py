"""Writes docs/design/house.md: the rooms of the house, what is in them, and which room imports which.

Nothing on that page is written by hand. Rooms and their order are the layers that pyproject.toml lists for import-linter,
arrows are what grimp finds in the source, and sentences are the first of each docstring. `make house` runs this script;
tests/test_house.py fails where the page differs from what the script would write.
"""

import ast
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import grimp

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/design/house.md"
TEXT = """\
# The house

<!-- Written by docs/house.py from the source and its import contracts. Do not edit it: run `make house`. -->

`src/{package}` is a house of rooms: folders that import one another in one direction only. `make lint` checks the directions
with [import-linter](https://import-linter.readthedocs.io), and `tests/test_architecture.py` checks that no files form a
circle. `make house` draws this page from the same contracts and from the source. CONTRIBUTING.md says where each kind of
change goes.

## Floors

A room imports rooms below it, never one above it or beside it.

```
{floors}
```

## Who imports whom

An x means that a file of the room on the left imports a file of the room with that number on top. Imports lead downwards
only, so every x stands left of its row's dot.

```
{matrix}
```

## The rooms, from top to bottom

{rooms}

## The contracts

These are the contracts in `[tool.importlinter]` of pyproject.toml. Layers are listed from top to bottom; one imports only those
after it.

{contracts}
"""


class House(NamedTuple):
    """A package, the contracts that its imports keep, and its imports."""

    package: str
    folder: Path
    contracts: list[dict]
    imports: list[tuple[str, str]]
    """(importing module, imported module), both of the package. Imports inside functions count too."""

    @classmethod
    def at(cls, root: Path) -> "House":
        """The house of the project in *root*."""
        settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
        package = settings["root_package"]
        sys.path.insert(0, str(root / "src"))
        try:
            graph = grimp.build_graph(package, cache_dir=None)
        finally:
            sys.path.pop(0)
        imports = [(one, other) for one in graph.modules for other in graph.find_modules_directly_imported_by(one)]
        return cls(package, root / "src" / package, settings["contracts"], imports)

    def floors(self, container: str) -> list[list[str]]:
        """The rooms of a package from top to bottom, those of one floor together; [] where no contract orders them."""
        for contract in self.contracts:
            if contract["type"] == "layers" and contract.get("exhaustive") and container in contract.get("containers", ()):
                return [re.split(r"\s*[|:]\s*", layer) for layer in contract["layers"]]
        return []

    def rooms(self, container: str) -> list[str]:
        """The folders of a package: from top to bottom where a contract orders them, else by name."""
        names = sorted(path.parent.name for path in self.path(container).glob("*/__init__.py"))
        order = {room: number for number, room in enumerate(chain.from_iterable(self.floors(container)))}
        return [f"{container}.{name}" for name in sorted(names, key=lambda name: order.get(name, len(order)))]

    def path(self, package: str) -> Path:
        """The folder of a package, as its dotted name says."""
        return self.folder.joinpath(*package.split(".")[1:])

    def arrows(self, package: str) -> set[str]:
        """The rooms that files of a package import, without their own; each by its name on the main floors."""
        others = {_main_room(other) for one, other in self.imports if f"{one}.".startswith(f"{package}.")}
        return others - {_main_room(package), ""}


def page(root: Path = ROOT) -> str:
    """The whole page, as Markdown."""
    house = House.at(root)
    floors = house.floors(house.package)
    drawn = [f"{len(floors) - number:>2}  {'   '.join(floor)}" for number, floor in enumerate(floors)]
    sections = [_files(house.folder), *(text for room in house.rooms(house.package) for text in _sections(house, room))]
    return TEXT.format(
        package=house.package,
        floors="\n".join(drawn),
        matrix=_matrix(house, [*chain.from_iterable(floors)][::-1]),
        rooms="\n\n".join(section for section in sections if section),
        contracts="\n".join(f"- {contract['name']}: {_terms(contract)}." for contract in house.contracts),
    )


def _matrix(house: House, rooms: list[str]) -> str:
    """A row for every room, which says which other rooms it imports."""
    label = max(map(len, rooms))
    lines = [" " * (label + 5) + "".join(f"{number:>3}" for number in range(1, len(rooms) + 1))]
    for number, one in enumerate(rooms, start=1):
        arrows = house.arrows(f"{house.package}.{one}")
        marks = ("." if other == one else "x" if other in arrows else "" for other in rooms)
        lines.append(f"{number:>3}  {one:<{label}}{''.join(f'{mark:>3}' for mark in marks)}".rstrip())
    return "\n".join(lines)


def _sections(house: House, room: str) -> list[str]:
    """A room's section, and those of the rooms inside it."""
    folder, name = house.path(room), room.removeprefix(f"{house.package}.").replace(".", "/")
    heading = f"{'#' * (2 + room.count('.'))} {name}"
    imports = f"Imports {', '.join(sorted(house.arrows(room))) or 'no other room'}."
    section = "\n\n".join([heading, f"{_says(folder / '__init__.py')} {_size(folder)} {imports}", _files(folder)])
    return [section.rstrip(), *(text for inner in house.rooms(room) for text in _sections(house, inner))]


def _files(folder: Path) -> str:
    """What each file of a folder is for."""
    files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    return "\n".join(f"- `{path.name}`: {_says(path)}" for path in files)


def _size(folder: Path) -> str:
    """Files and lines of a folder. Lines are rounded to hundreds, so that few changes of the source change the page."""
    files = list(folder.rglob("*.py"))
    hundreds = round(sum(len(path.read_text().splitlines()) for path in files) / 100)
    lines = f"about {100 * hundreds:,} lines." if hundreds else "under 50 lines."
    return f"{len(files)} file{'s' if len(files) > 1 else ''}, {lines}"


def _says(path: Path) -> str:
    """The first sentence of a file's docstring, in Markdown."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence).replace("``", "`")


def _terms(contract: dict) -> str:
    """What a contract demands."""
    if contract["type"] == "layers":
        return f"layers of {', '.join(contract.get('containers', ['the package']))}: {', '.join(contract['layers'])}"
    if contract["type"] == "forbidden":
        return f"{', '.join(contract['source_modules'])} may not import {', '.join(contract['forbidden_modules'])}"
    return contract["type"]


def _main_room(module: str) -> str:
    """The room on the main floors in which a module lies; "" for the package itself."""
    return f"{module}.".split(".")[1]


if __name__ == "__main__":
    (ROOT / PAGE).write_text(page())
