"""The command line: one file a command, and main.py, which puts them together."""

from routepack.cli.main import app, main

__all__ = ["app", "main"]
