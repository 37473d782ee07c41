"""The RL loop: sample, plan, move, update."""
