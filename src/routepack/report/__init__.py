"""A plan as one self-contained page: what it changes, what remains, and how far to trust it."""

from routepack.report.plan_page import render_report, write_report

__all__ = ["render_report", "write_report"]
