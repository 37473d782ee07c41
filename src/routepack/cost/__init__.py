"""What a step costs: cost models, links, calibration from measured steps, and lower bounds."""
