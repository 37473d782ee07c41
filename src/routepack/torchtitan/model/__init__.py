"""TorchTitan's models with replayed routes and placed experts."""
