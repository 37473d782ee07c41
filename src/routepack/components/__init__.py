"""What a config can swap: collector, rerouter, packer, and the MoE layer."""
