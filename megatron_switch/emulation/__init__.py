"""CUDA emulated on the CPU, so that unmodified Megatron trains over gloo."""

from megatron_switch.emulation.launch import import_megatron, launch
from megatron_switch.emulation.patches import cuda_on_cpu

__all__ = ["cuda_on_cpu", "import_megatron", "launch"]
