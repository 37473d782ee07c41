"""From a plan and a window to the microbatches of one rank."""
