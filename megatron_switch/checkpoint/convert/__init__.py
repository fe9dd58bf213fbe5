"""Conversion between Hugging Face's formats and Megatron's: name maps, packing, verification."""
