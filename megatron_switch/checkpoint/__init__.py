"""Checkpoints: what is complete, what matches, and what may be loaded."""
