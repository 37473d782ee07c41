"""The command line, one file a command."""

from routepack.cli.main import main

__all__ = ["main"]
