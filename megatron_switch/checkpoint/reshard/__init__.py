"""Rewriting a checkpoint for another parallel layout, offline, in one process."""
