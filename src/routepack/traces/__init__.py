"""What was recorded: trace and demand files, and the formats of every stack that records routes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["formats"])
