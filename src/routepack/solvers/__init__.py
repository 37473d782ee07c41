"""Pure functions on arrays: no config, no I/O, no torch. Each module loads when it is first used."""

from pathlib import Path

import lazy_loader

_MODULES = {path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__"}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=_MODULES)
