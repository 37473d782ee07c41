"""RoutePack: expert placement and attention-aware packing for MoE reinforcement learning."""
