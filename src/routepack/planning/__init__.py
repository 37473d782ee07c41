"""From a window to a plan: the planner, the phases of its search, plan files, and an independent check of a plan."""
