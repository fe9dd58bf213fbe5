"""CUDA calls answered by the CPU, so that unmodified Megatron trains over gloo."""
