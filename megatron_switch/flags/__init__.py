"""Flags as plain values: which exist, what becomes of Megatron's, defaults by recipe. No torch."""
