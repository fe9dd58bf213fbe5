"""Flags as plain values: which exist, how Megatron's are handled, defaults by recipe. No torch."""
