"""``routepack check``: a config, checked without running it."""

import typer
from omegaconf import OmegaConf

from routepack.cli.arguments import Layers
from routepack.cli.plan import planner_of
from routepack.core.config import load, split_layers


def check(layers: Layers) -> None:
    """Build every component of a config, run nothing, and print the whole config; for training, also a rank's memory."""
    config, memory = load(*split_layers(layers)), ""
    if "trace" in config.keys():  # noqa: SIM118 - a value that is still ??? counts too
        planner_of(config)
    else:
        from routepack.torchtitan.launch.launch import check as check_training

        memory = f"{check_training(config)}\n"
    typer.echo(OmegaConf.to_yaml(config).rstrip())
    typer.echo(f"{memory}ok", err=True)
