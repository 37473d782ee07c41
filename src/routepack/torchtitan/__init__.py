"""RoutePack in TorchTitan 0.3.0: overrides, trainer, rollouts and the RL loop.

Importing this package chooses TorchTitan's device, which must come before TorchTitan's own modules:
see :mod:`routepack.torchtitan.model.cpu_device`.
"""

from routepack.torchtitan.model import cpu_device

cpu_device.install()
