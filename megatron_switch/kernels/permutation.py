"""Rows in their new places: the gather of a dispatch, and the scatter of a combine.

A map is two index tensors: ``source_N`` names the source of each new row, ``copies_SK`` the new
rows that hold copies of each source; -1 is none. They are each other's transpose, so every gradient
is again a gather: no atomics, the same bits every time. Rows without a source are written as zeros
in the same pass. Rows are bfloat16, float16 or float32 and nothing else, for they pass through
float32 registers, as do sums and gates.

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

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 1024
"""Columns that a program holds at a time: 8 a thread, 16 bytes of bfloat16."""


def gather_rows(x_SD: Tensor, source_N: Tensor, copies_SK: Tensor) -> Tensor:
    """Return the rows of ``x`` in their new places, zeros where there is no source.

    Args:
        x_SD: Source rows, shape (S, D).
        source_N: Source of each new row, shape (N,), integers in [-1, S).
        copies_SK: New rows of each source, shape (S, K), integers in [-1, N).

    Returns:
        Shape (N, D), dtype of ``x``.
    """
    _check(source_N, copies_SK, len(source_N), len(x_SD))
    rows_ND: Tensor = _Gather.apply(x_SD, source_N.contiguous(), copies_SK.contiguous())
    return rows_ND


def scatter_rows(
    rows_ND: Tensor, source_N: Tensor, copies_SK: Tensor, gate_S: Tensor | None = None
) -> Tensor:
    """Return rows to their sources, the transpose of :func:`gather_rows`; copies are summed.

    Args:
        rows_ND: Rows in their new places, shape (N, D).
        source_N: As in :func:`gather_rows`.
        copies_SK: As in :func:`gather_rows`.
        gate_S: Factor of each source, shape (S,), float32. Default: none.

    Returns:
        Shape (S, D), dtype of the rows; exactly zero for a source without rows, whatever its gate.
    """
    _check(source_N, copies_SK, len(rows_ND), len(copies_SK))
    if gate_S is not None:
        gate_S = vector(gate_S, len(copies_SK))
    y_SD: Tensor = _Scatter.apply(rows_ND, source_N.contiguous(), copies_SK.contiguous(), gate_S)
    return y_SD


def _check(source_N: Tensor, copies_SK: Tensor, num_rows: int, num_sources: int) -> None:
    assert source_N.shape == (num_rows,), (source_N.shape, num_rows)
    assert copies_SK.ndim == 2, copies_SK.shape
    assert len(copies_SK) == num_sources, (copies_SK.shape, num_sources)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, source_N: Tensor, copies_SK: Tensor) -> Tensor:
        ctx.save_for_backward(copies_SK)
        return _gathered(x_SD, source_N.unsqueeze(1), None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (copies_SK,) = ctx.saved_tensors
        return _gathered(grad_ND, copies_SK, None), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, source_N: Tensor, copies_SK: Tensor, gate_S: Tensor | None
    ) -> Tensor:
        rows_ND = rows_ND.contiguous()
        kept = (None, None, None) if gate_S is None else (rows_ND, copies_SK, gate_S)
        ctx.save_for_backward(source_N, *kept)
        return _gathered(rows_ND, copies_SK, gate_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        source_N, rows_ND, copies_SK, gate_S = ctx.saved_tensors
        if gate_S is None:
            return _gathered(grad_SD, source_N.unsqueeze(1), None), None, None, None
        grad_rows_ND, dot_N = torch.empty_like(rows_ND), gate_S.new_empty(len(rows_ND))
        num_rows, width = rows_ND.shape
        launch(
            _scatter_backward_kernel,
            (num_rows,),
            *(grad_SD.contiguous(), rows_ND, source_N, gate_S, grad_rows_ND, dot_N, width),
            BLOCK_D=_block(width),
        )
        grad_gate_S = _gathered(dot_N.unsqueeze(1), copies_SK, None).squeeze(1)
        return grad_rows_ND, None, None, grad_gate_S


def _gathered(x_SD: Tensor, index_NK: Tensor, gate_N: Tensor | None) -> Tensor:
    """Return ``gate[n] * sum_k x[index[n, k]]``, where -1 adds nothing."""
    assert x_SD.dtype in _DTYPES, x_SD.dtype  # integers would lose digits
    x_SD = x_SD.contiguous()
    (num_rows, copies), width = index_NK.shape, x_SD.shape[1]
    out_ND = x_SD.new_empty(num_rows, width)
    block = _block(width)
    launch(
        _gather_kernel,
        (num_rows, triton.cdiv(width, block)),
        *(x_SD, index_NK, gate_N, out_ND, width),
        NUM_COPIES=copies,
        BLOCK_D=block,
    )
    return out_ND


def _block(width: int) -> int:
    block: int = min(_WIDEST, triton.next_power_of_2(width))
    return block


@triton.jit
def _gather_kernel(
    x_ptr, index_ptr, gate_ptr, out_ptr, width, NUM_COPIES: tl.constexpr, BLOCK_D: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < width
    total = tl.zeros([BLOCK_D], tl.float32)
    found = False
    for copy in tl.static_range(NUM_COPIES):
        source = tl.load(index_ptr + row * NUM_COPIES + copy).to(tl.int64)
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
    source_ptr,
    gate_ptr,
    grad_rows_ptr,
    dot_ptr,
    width,
    BLOCK_D: tl.constexpr,
):
    """Write for one row its gradient, and its share of the gradient of its source's gate."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ptr + row).to(tl.int64)
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
