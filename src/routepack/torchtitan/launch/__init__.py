"""``routepack train``: starts the ranks and reports how they ended."""
