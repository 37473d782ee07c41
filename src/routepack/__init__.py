"""RoutePack: expert placement and attention-aware packing for MoE reinforcement learning.

Everything public is listed in ``__init__.pyi``. Each name loads its module when it is first used, so that importing
RoutePack costs neither torch nor a trainer.
"""

import lazy_loader

__version__ = "0.1.0.dev0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
