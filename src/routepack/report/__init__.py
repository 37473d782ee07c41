"""What people read: a plan as a page, a trace as tables, figures for loggers."""
