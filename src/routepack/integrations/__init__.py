"""The only places that import a trainer."""
