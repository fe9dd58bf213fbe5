"""Rows in their new places: the gather of a dispatch, and the scatter of a combine.

A map is two index tensors: ``take_N`` names the source of each new row, ``back_SK`` the new rows
that hold copies of each source; -1 is none. They are each other's transpose, so every gradient is
again a gather: no atomics, the same bits every time. Rows without a source are written as zeros in
the same pass. Rows are bfloat16, float16 or float32; sums, gates and products are float32 in
registers.

Shape letters:

    S  source rows (tokens)    N  new rows (slots)    D  width of a row
    K  copies of a source row
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_switch.kernels.launch import launch, vector

_WIDEST = 1024
"""Columns that a program holds at a time: 8 a thread, 16 bytes of bfloat16."""


def gather_rows(x_SD: Tensor, take_N: Tensor, back_SK: Tensor) -> Tensor:
    """Return the rows of ``x`` in their new places, zeros where there is no source.

    Args:
        x_SD: Source rows, shape (S, D).
        take_N: Source of each new row, shape (N,), integers in [-1, S).
        back_SK: New rows of each source, shape (S, K), integers in [-1, N).

    Returns:
        Shape (N, D), dtype of ``x``.
    """
    _check(take_N, back_SK, len(take_N), len(x_SD))
    rows_ND: Tensor = _Gather.apply(x_SD, take_N.contiguous(), back_SK.contiguous())
    return rows_ND


def scatter_rows(
    rows_ND: Tensor, take_N: Tensor, back_SK: Tensor, gate_S: Tensor | None = None
) -> Tensor:
    """Return rows to their sources, the transpose of :func:`gather_rows`; copies are summed.

    Args:
        rows_ND: Rows in their new places, shape (N, D).
        take_N: As in :func:`gather_rows`.
        back_SK: As in :func:`gather_rows`.
        gate_S: Factor of each source, shape (S,), float32. Default: none.

    Returns:
        Shape (S, D), dtype of the rows; exactly zero for a source without rows, whatever its gate.
    """
    _check(take_N, back_SK, len(rows_ND), len(back_SK))
    if gate_S is not None:
        gate_S = vector(gate_S, len(back_SK))
    y_SD: Tensor = _Scatter.apply(rows_ND, take_N.contiguous(), back_SK.contiguous(), gate_S)
    return y_SD


def _check(take_N: Tensor, back_SK: Tensor, num_rows: int, num_sources: int) -> None:
    assert take_N.shape == (num_rows,), (take_N.shape, num_rows)
    assert back_SK.ndim == 2, back_SK.shape
    assert len(back_SK) == num_sources, (back_SK.shape, num_sources)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, take_N: Tensor, back_SK: Tensor) -> Tensor:
        ctx.save_for_backward(back_SK)
        return _gathered(x_SD, take_N.unsqueeze(1), None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (back_SK,) = ctx.saved_tensors
        return _gathered(grad_ND, back_SK, None), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, take_N: Tensor, back_SK: Tensor, gate_S: Tensor | None
    ) -> Tensor:
        rows_ND = rows_ND.contiguous()
        kept = (None, None, None) if gate_S is None else (rows_ND, back_SK, gate_S)
        ctx.save_for_backward(take_N, *kept)
        return _gathered(rows_ND, back_SK, gate_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        take_N, rows_ND, back_SK, gate_S = ctx.saved_tensors
        if gate_S is None:
            return _gathered(grad_SD, take_N.unsqueeze(1), None), None, None, None
        grad_rows_ND, dot_N = torch.empty_like(rows_ND), gate_S.new_empty(len(rows_ND))
        num_rows, width = rows_ND.shape
        launch(
            _scatter_backward_kernel,
            (num_rows,),
            *(grad_SD.contiguous(), rows_ND, take_N, gate_S, grad_rows_ND, dot_N, width),
            BLOCK_D=_block(width),
        )
        grad_gate_S = _gathered(dot_N.unsqueeze(1), back_SK, None).squeeze(1)
        return grad_rows_ND, None, None, grad_gate_S


def _gathered(x_SD: Tensor, index_NK: Tensor, gate_N: Tensor | None) -> Tensor:
    """Return ``gate[n] * sum_k x[index[n, k]]``, where -1 adds nothing."""
    x_SD = x_SD.contiguous()
    (num_rows, copies), width = index_NK.shape, x_SD.shape[1]
    out_ND = x_SD.new_empty(num_rows, width)
    block = _block(width)
    launch(
        _gather_kernel,
        (num_rows, triton.cdiv(width, block)),
        *(x_SD, index_NK, gate_N, out_ND, width),
        COPIES=copies,
        BLOCK_D=block,
    )
    return out_ND


def _block(width: int) -> int:
    block: int = min(_WIDEST, triton.next_power_of_2(width))
    return block


@triton.jit
def _gather_kernel(
    x_ptr, index_ptr, gate_ptr, out_ptr, width, COPIES: tl.constexpr, BLOCK_D: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < width
    total = tl.zeros([BLOCK_D], tl.float32)
    found = False
    for copy in tl.static_range(COPIES):
        source = tl.load(index_ptr + row * COPIES + copy).to(tl.int64)
        x = tl.load(x_ptr + source * width + column, mask=inside & (source >= 0), other=0.0)
        total += x.to(tl.float32)
        found = found | (source >= 0)
    if gate_ptr is not None:  # not read where there is no row: 0 times infinity is no zero
        total *= tl.load(gate_ptr + row, mask=found, other=0.0)
    tl.store(out_ptr + row * width + column, total, mask=inside)


@triton.jit
def _scatter_backward_kernel(
    grad_ptr,
    rows_ptr,
    take_ptr,
    gate_ptr,
    grad_rows_ptr,
    dot_ptr,
    width,
    BLOCK_D: tl.constexpr,
):
    """Write for one row its gradient, and its share of the gradient of its source's gate."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(take_ptr + row).to(tl.int64)
    gate = tl.load(gate_ptr + source, mask=source >= 0, other=0.0)
    dot = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, width, BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        mask = (column < width) & (source >= 0)
        grad = tl.load(grad_ptr + source * width + column, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(rows_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_rows_ptr + row * width + column, grad * gate, mask=column < width)
        dot += grad * x
    tl.store(dot_ptr + row, tl.sum(dot, axis=0))
