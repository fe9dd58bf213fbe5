"""Start a Triton kernel, or nothing where there is nothing to compute.

Outputs are allocated before a launch, so under fake tensors the allocation alone gives shapes,
dtypes and devices, and no kernel needs a second description of them.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_switch.upstream.private import has_values


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel on the device of its first argument.

    Args:
        kernel: Function decorated with ``triton.jit``.
        grid: Programs along each axis; a 0 among them means that there is no work.
        *arguments: Contiguous tensors (None for one that is not used) and numbers, by position. The
            first is a tensor.
        **constants: Compile-time constants, by name.
    """
    first = arguments[0]
    if 0 in grid or not has_values(first):
        return
    with torch.cuda.device(first.get_device()):  # where Triton launches; -1, the CPU's, is ignored
        kernel[grid](*arguments, **constants)


def vector(values: Tensor, length: int) -> Tensor:
    """Return a vector as a kernel reads it, its length checked."""
    assert values.shape == (length,), (values.shape, length)
    return values.contiguous()
