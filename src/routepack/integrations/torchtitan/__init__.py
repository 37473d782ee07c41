"""RoutePack in TorchTitan 0.3.0: overrides, trainer, rollouts and the RL loop."""
