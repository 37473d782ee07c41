"""``routepack train``: a config, handed to the launcher that starts its ranks."""

import typer

from routepack.cli.arguments import Layers
from routepack.core.config import split_layers


def train(layers: Layers) -> None:
    """Train a model with a plan for every step. Starts one process per rank, unless torchrun has started them."""
    # Imported here, because it loads torch and TorchTitan, which other commands do without.
    from routepack.torchtitan.launch.launch import train as train_on_ranks

    if code := train_on_ranks(*split_layers(layers)):
        raise typer.Exit(code)
