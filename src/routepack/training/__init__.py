"""What any trainer needs and no trainer owns: losses, tasks, checks of a step, and what a run shows."""
