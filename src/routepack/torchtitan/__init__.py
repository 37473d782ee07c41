"""RoutePack in TorchTitan 0.3.0: models with replayed routes and placed experts, the trainer, rollouts and the RL loop."""
