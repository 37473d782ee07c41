"""Experts move between ranks, with their optimizer state."""
