"""Matrix products of rows with the weights of their experts, in plain torch; not differentiable.

Rows are ordered by expert and come with one count for each. Equal counts, an empty buffer among
them, are one batched product; unequal ones a grouped kernel where the device has it, else a loop
over experts. Every expert's weight gets a gradient, zeros where it saw no row: optimizers and
gradient buckets must not depend on where tokens went.

Shape letters:

    R  rows, all experts of this rank    e  local experts    I, O  input and output width
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 8
"""Widths, in bfloat16 elements, that the grouped kernel takes: rows start at 16-byte addresses."""


def grouped_matmul(rows_RI: Tensor, weight_eIO: Tensor, counts: list[int]) -> Tensor:
    """Return each row times the weight of its expert.

    Args:
        rows_RI: Rows, ordered by expert, shape (R, I).
        weight_eIO: Weights, shape (e, I, O), dtype of the rows.
        counts: Rows of each expert; they sum to R.

    Returns:
        Shape (R, O).
    """
    num_rows, width = len(rows_RI), weight_eIO.shape[2]
    if len(counts) == 1:
        return torch.mm(rows_RI, weight_eIO[0])
    if len(set(counts)) == 1:  # as with padded dispatch: one batched product
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
    """Return the sum of the outer products of each expert's rows.

    Args:
        grad_RO: Rows, ordered by expert, shape (R, O).
        rows_RI: Rows in the same order, shape (R, I).
        counts: Rows of each expert; they sum to R.

    Returns:
        Shape (e, O, I).
    """
    if len(set(counts)) > 1 and _has_grouped_kernel(rows_RI, grad_RO.shape[1]):
        sums = F.grouped_mm(grad_RO.t(), rows_RI, offs=_ends(counts, rows_RI.device))
        for out, count in zip(sums, counts, strict=True):
            if count == 0:  # the kernel does not promise to write it
                out.zero_()
        return sums
    sums = rows_RI.new_empty(len(counts), grad_RO.shape[1], rows_RI.shape[1])
    write_grouped_outer(sums, grad_RO, rows_RI, counts, add=False)
    return sums


def write_grouped_outer(
    sums_eOI: Tensor, grad_RO: Tensor, rows_RI: Tensor, counts: list[int], *, add: bool
) -> None:
    """Write what :func:`grouped_outer` returns to a tensor, or add it to what the tensor holds.

    Args:
        sums_eOI: Destination, shape (e, O, I), dtype of the rows.
        grad_RO: As in :func:`grouped_outer`.
        rows_RI: As in :func:`grouped_outer`.
        counts: As in :func:`grouped_outer`.
        add: Whether to keep the values of ``sums_eOI`` and add to them.
    """
    # Not addmm_ and its like: torch's counter of FLOPs does not know them.
    if len(counts) > 1 and len(set(counts)) == 1:
        grads = grad_RO.reshape(len(counts), counts[0], grad_RO.shape[1])
        rows = rows_RI.reshape(len(counts), counts[0], rows_RI.shape[1])
        if add:
            torch.baddbmm(sums_eOI, grads.mT, rows, out=sums_eOI)
        else:
            torch.bmm(grads.mT, rows, out=sums_eOI)
        return
    parts = zip(sums_eOI, torch.split(grad_RO, counts), torch.split(rows_RI, counts), strict=True)
    for sums, grad, part in parts:
        if add:
            torch.addmm(sums, grad.t(), part, out=sums)
        else:
            torch.mm(grad.t(), part, out=sums)


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
