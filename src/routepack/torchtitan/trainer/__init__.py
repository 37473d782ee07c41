"""TorchTitan's trainer, driven by plans."""
