"""RoutePack in TorchTitan 0.3.0: models with replayed routes and placed experts, the trainer, rollouts and the RL loop."""

import lazy_loader

# The public names are listed in __init__.pyi; each loads its module when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
