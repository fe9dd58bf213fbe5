"""Tokenizers, Megatron's indexed token files, and the samples that training reads from them."""
