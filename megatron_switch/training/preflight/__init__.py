"""Checks before any process group exists: flags, data, device, memory, places to write."""
