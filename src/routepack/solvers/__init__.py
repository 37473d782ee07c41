"""Pure functions on arrays: no config, no I/O, no torch."""
