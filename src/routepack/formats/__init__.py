"""Recorded routing of each stack to a RolloutBatch; none of the stacks is imported."""
