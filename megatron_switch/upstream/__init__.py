"""Megatron-Core and torch as installed: supported version, patches, private names, groups."""
