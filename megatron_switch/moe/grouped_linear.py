"""Matrix products of rows with the weights of their experts, in plain torch.

Rows are ordered by expert and come with one count for each. Equal counts, an empty buffer among
them, are one batched product; unequal ones a grouped kernel where the device has it, else a loop
over experts. Every expert's weight gets a gradient, zeros where it saw no row: optimizers and
gradient buckets must not depend on where tokens went.

:func:`activated_grouped_linear` saves the input of the activation and recomputes the rest in
backward: one elementwise pass instead of up to three more saved [R, F] tensors. Megatron's
``--recompute-modules moe_act`` does the same; here it is always on.

Shape letters:

    R  rows, all experts of this rank    e  local experts    I, O  input and output width
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Activate = Callable[[Tensor, Tensor], Tensor]
"""``(input, gate_R) -> hidden``: differentiable in both, the same each time it is called."""

_ALIGNMENT = 8
"""Widths, in bfloat16 elements, that the grouped kernel takes: rows start at 16-byte addresses."""


def grouped_linear(rows_RI: Tensor, weight_eOI: Tensor, counts: list[int]) -> Tensor:
    """Return each row times the transposed weight of its expert.

    Args:
        rows_RI: Rows, ordered by expert, shape (R, I).
        weight_eOI: Weights, shape (e, O, I), dtype of the rows.
        counts: Rows of each expert; they sum to R.

    Returns:
        Shape (R, O).
    """
    out_RO: Tensor = _GroupedLinear.apply(rows_RI, weight_eOI, counts)
    return out_RO


def activated_grouped_linear(
    input_RH: Tensor, gate_R: Tensor, weight_eOI: Tensor, counts: list[int], activate: Activate
) -> Tensor:
    """Return ``grouped_linear(activate(input, gate), weight, counts)``.

    Args:
        input_RH: Input of the activation, shape (R, H); saved for backward, with the gates.
        gate_R: Router probability of each row, shape (R,).
        weight_eOI: Weights, shape (e, O, I).
        counts: Rows of each expert; they sum to R.
        activate: The activation, from (R, H) and (R,) to (R, I).

    Returns:
        Shape (R, O).
    """
    out_RO: Tensor = _ActivatedGroupedLinear.apply(input_RH, gate_R, weight_eOI, counts, activate)
    return out_RO


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weight_eOI: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows_RI, weight_eOI)
        ctx.counts = counts
        return grouped_matmul(rows_RI, weight_eOI.transpose(1, 2), counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RI, weight_eOI = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = grouped_matmul(grad_RO, weight_eOI, ctx.counts)
        if ctx.needs_input_grad[1]:
            grad_weight = grouped_outer(grad_RO, rows_RI, ctx.counts)
        return grad_rows, grad_weight, None


class _ActivatedGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_RH: Tensor,
        gate_R: Tensor,
        weight_eOI: Tensor,
        counts: list[int],
        activate: Activate,
    ) -> Tensor:
        ctx.save_for_backward(input_RH, gate_R, weight_eOI)
        ctx.counts, ctx.activate = counts, activate
        return grouped_matmul(activate(input_RH, gate_R), weight_eOI.transpose(1, 2), counts)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_RO: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        input_RH, gate_R, weight_eOI = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        # A graph of the activation alone, through which the hidden gradient is sent below.
        with torch.enable_grad():
            input_RH = input_RH.detach().requires_grad_()
            gate_R = gate_R.detach().requires_grad_()
            hidden_RI = ctx.activate(input_RH, gate_R)
        grad_weight = None
        if ctx.needs_input_grad[2]:
            grad_weight = grouped_outer(grad_RO, hidden_RI.detach(), ctx.counts)
        grad_hidden_RI = grouped_matmul(grad_RO, weight_eOI, ctx.counts)
        grad_input, grad_gate = torch.autograd.grad(hidden_RI, (input_RH, gate_R), grad_hidden_RI)
        return grad_input, grad_gate, grad_weight, None, None


def grouped_matmul(rows_RI: Tensor, weight_eIO: Tensor, counts: list[int]) -> Tensor:
    """Return each row times the weight of its expert: shape (R, O). Not differentiable."""
    num_rows, width = len(rows_RI), weight_eIO.shape[2]
    if len(set(counts)) == 1:  # equal counts, as with padded dispatch: one batched product
        batches = rows_RI.reshape(len(counts), counts[0], rows_RI.shape[1])
        return torch.bmm(batches, weight_eIO).view(num_rows, width)
    if _has_grouped_kernel(rows_RI, width):
        return F.grouped_mm(rows_RI, weight_eIO, offs=_ends(counts, rows_RI.device))
    out_RO = rows_RI.new_empty(num_rows, width)
    parts = zip(torch.split(rows_RI, counts), torch.split(out_RO, counts), weight_eIO, strict=True)
    for rows, out, weight in parts:
        torch.mm(rows, weight, out=out)
    return out_RO


def grouped_outer(grad_RO: Tensor, rows_RI: Tensor, counts: list[int]) -> Tensor:
    """Return the sum of outer products of each expert's rows: (e, O, I). Not differentiable."""
    shape = (len(counts), grad_RO.shape[1], rows_RI.shape[1])
    if len(set(counts)) == 1:
        grads = grad_RO.reshape(len(counts), counts[0], shape[1])
        return torch.bmm(grads.transpose(1, 2), rows_RI.reshape(len(counts), counts[0], shape[2]))
    if _has_grouped_kernel(rows_RI, grad_RO.shape[1]):
        sums = F.grouped_mm(grad_RO.t(), rows_RI, offs=_ends(counts, rows_RI.device))
        for out, count in zip(sums, counts, strict=True):
            if count == 0:  # the kernel does not promise to write it
                out.zero_()
        return sums
    sums = rows_RI.new_empty(shape)
    parts = zip(torch.split(grad_RO, counts), torch.split(rows_RI, counts), sums, strict=True)
    for grad, rows, out in parts:
        torch.mm(grad.t(), rows, out=out)
    return sums


def _has_grouped_kernel(rows_RI: Tensor, width: int) -> bool:
    """Whether torch multiplies groups of rows in one kernel on this device."""
    if rows_RI.device.type != "cuda" or rows_RI.dtype != torch.bfloat16:
        return False
    aligned = rows_RI.shape[1] % _ALIGNMENT == 0 and width % _ALIGNMENT == 0
    return aligned and torch.cuda.get_device_capability(rows_RI.device) >= (8, 0)


def _ends(counts: list[int], device: torch.device) -> Tensor:
    """Return for each group the index after its last row, int32 on the device."""
    ends = torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    return ends.to(device, non_blocking=True)
