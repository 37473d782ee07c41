"""RoutePack in TorchTitan 0.3.0: overrides, trainer, rollouts and the RL loop.

Importing this package chooses TorchTitan's device, which must come before TorchTitan's own modules:
see :mod:`routepack.torchtitan.model.cpu_device`.
"""

import lazy_loader

from routepack.torchtitan.model import cpu_device

cpu_device.install()
# The public names are listed in __init__.pyi; each loads its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
