"""Checkpoints that do not depend on where the experts are."""
