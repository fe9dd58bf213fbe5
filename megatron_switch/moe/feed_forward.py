"""The feed-forward networks of experts, forward and backward in one autograd function.

Decisions:

* The gate multiplies the output, not the hidden activation: without biases the two are the same
  number. Its gradient is ``sum(hidden * (grad_out @ W2))``, a product that backward needs anyway,
  so the output is not kept, and a pass of the gate has the width of the model, not the hidden one.
* Kept for backward are the rows, the gates and the input of the activation; with ReLU its output,
  which is written in place. What else backward needs is computed again.
* A CPU computes one expert after another: the tensors of one expert fit the cache, and the
  allocator gives each expert the memory of the one before. Other devices compute all experts at
  once, in grouped products.
* Where Megatron sums gradients in a ``main_grad``, they are added to it here, inside the product if
  the dtypes agree. What autograd then gets has no values, as with Megatron's own fused products.

Shape letters:

    R  rows, ordered by expert    e  local experts    D  model    F  hidden width
    H  width of the first product: F, or 2 F with a gated unit
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_switch.moe.grouped_products import grouped_matmul, grouped_outer, write_grouped_outer

Activate = Callable[[Tensor, Tensor | None], Tensor]
"""``(input_RH, key_R) -> hidden_RF``: differentiable in the input, the same each time."""


def feed_forward(
    rows_RD: Tensor,
    gate_R: Tensor,
    weight1_eHD: Tensor,
    weight2_eDF: Tensor,
    counts: list[int],
    activate: Activate | None = None,
    key_R: Tensor | None = None,
) -> Tensor:
    """Return ``gate * activate(rows @ weight1.mT) @ weight2.mT``, each row with its expert.

    Args:
        rows_RD: Rows ordered by expert, shape (R, D).
        gate_R: Factor of each row's output, shape (R,), float32 or wider.
        weight1_eHD: First matrices, shape (e, H, D).
        weight2_eDF: Second matrices, shape (e, D, F).
        counts: Rows of each expert; they sum to R.
        activate: The activation; None for ReLU, computed in place.
        key_R: Random key of each row, shape (R,), int64, which ``activate`` gets.

    Returns:
        Shape (R, D), dtype of the rows.
    """
    out_RD: Tensor = _FeedForward.apply(
        rows_RD, gate_R, weight1_eHD, weight2_eDF, counts, activate, key_R
    )
    return out_RD


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        gate_R: Tensor,
        weight1_eHD: Tensor,
        weight2_eDF: Tensor,
        counts: list[int],
        activate: Activate | None,
        key_R: Tensor | None,
    ) -> Tensor:
        ctx.counts, ctx.activate = counts, activate
        out_RD = torch.empty_like(rows_RD)
        kept = []  # by block: one large tensor would be new pages of memory in every pass
        for block in _blocks(counts, rows_RD.device):
            part, experts = block.rows, block.experts
            input_RH = grouped_matmul(rows_RD[part], weight1_eHD[experts].mT, block.counts)
            if activate is None:
                hidden_RF = input_RH.relu_()
            else:
                hidden_RF = activate(input_RH, _part(key_R, part))
            kept.append(input_RH)
            product_RD = grouped_matmul(hidden_RF, weight2_eDF[experts].mT, block.counts)
            torch.mul(product_RD, gate_R[part, None], out=out_RD[part])
        ctx.save_for_backward(rows_RD, gate_R, weight1_eHD, weight2_eDF, key_R, *kept)
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, gate_R, weight1_eHD, weight2_eDF, key_R, *kept = ctx.saved_tensors
        wants_rows, _, wants_first, wants_second = ctx.needs_input_grad[:4]
        grads = _Gradients(
            rows_RD=torch.empty_like(rows_RD) if wants_rows else None,
            gate_R=torch.empty_like(gate_R),
            first=_WeightGradient(weight1_eHD) if wants_first else None,
            second=_WeightGradient(weight2_eDF) if wants_second else None,
        )
        grad_RD = grad_RD.contiguous()
        for block, input_RH in zip(_blocks(ctx.counts, rows_RD.device), kept, strict=True):
            inputs = rows_RD[block.rows], gate_R[block.rows, None], weight1_eHD, weight2_eDF
            activation = ctx.activate, input_RH, _part(key_R, block.rows)
            _backward_of(block, grad_RD[block.rows], inputs, activation, grads)
        first, second = (
            None if each is None else each.result() for each in (grads.first, grads.second)
        )
        return grads.rows_RD, grads.gate_R, first, second, None, None, None


@dataclass(frozen=True)
class _Block:
    """Experts that are computed together."""

    rows: slice
    experts: slice
    counts: list[int]


def _blocks(counts: list[int], device: torch.device) -> Iterator[_Block]:
    if device.type != "cpu":
        yield _Block(slice(0, sum(counts)), slice(0, len(counts)), counts)
        return
    start = 0
    for expert, count in enumerate(counts):
        yield _Block(slice(start, start + count), slice(expert, expert + 1), [count])
        start += count


class _WeightGradient:
    """The gradient of stacked matrices: a tensor of its own, or Megatron's buffer."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        # Megatron's hook adds what autograd gets to the buffer, unless this attribute is true.
        has_hook = hasattr(weight, "grad_added_to_main_grad")
        self._buffer: Tensor | None = getattr(weight, "main_grad", None) if has_hook else None
        self._sums: Tensor | None = None

    def add(self, block: _Block, grad_RO: Tensor, rows_RI: Tensor) -> None:
        """Add the outer products of a block's rows; each block is added once."""
        products = grad_RO, rows_RI, block.counts
        if self._buffer is not None:
            sums_eOI = self._buffer[block.experts]
            if sums_eOI.dtype == grad_RO.dtype:
                write_grouped_outer(sums_eOI, *products, add=True)
            else:
                sums_eOI.add_(grouped_outer(*products))
        elif len(block.counts) == len(self._weight):
            self._sums = grouped_outer(*products)
        else:
            if self._sums is None:
                self._sums = torch.empty_like(self._weight)
            write_grouped_outer(self._sums[block.experts], *products, add=False)

    def result(self) -> Tensor | None:
        """Return what autograd gets."""
        if self._buffer is None:
            return self._sums
        self._weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.empty_like(self._weight)  # for the hooks that a gradient starts


@dataclass(frozen=True)
class _Gradients:
    """What backward fills block by block; None where autograd does not ask."""

    rows_RD: Tensor | None
    gate_R: Tensor
    first: _WeightGradient | None
    second: _WeightGradient | None


def _backward_of(
    block: _Block,
    grad_RD: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    activation: tuple[Activate | None, Tensor, Tensor | None],
    grads: _Gradients,
) -> None:
    """Fill in the gradients of a block of experts; its other tensors end with this function."""
    rows_RD, gate_R1, weight1_eHD, weight2_eDF = inputs
    # Gradient of the hidden activation before the gate, which gives the gate's own.
    grad_hidden_RF = grouped_matmul(grad_RD, weight2_eDF[block.experts], block.counts)
    hidden_RF, grad_input_RH = _through_activation(*activation, grad_hidden_RF)
    wide = grads.gate_R.dtype
    grads.gate_R[block.rows] = torch.linalg.vecdot(hidden_RF.to(wide), grad_hidden_RF.to(wide))
    del grad_hidden_RF
    # The gate enters by factors of width D: rows of the outer products, rows' gradient.
    if grads.second is not None:
        grads.second.add(block, _times(grad_RD, gate_R1), hidden_RF)
    del hidden_RF
    if grads.first is not None:
        grads.first.add(block, grad_input_RH, _times(rows_RD, gate_R1))
    if grads.rows_RD is not None:
        product_RD = grouped_matmul(grad_input_RH, weight1_eHD[block.experts], block.counts)
        torch.mul(product_RD, gate_R1, out=grads.rows_RD[block.rows])


def _through_activation(
    activate: Activate | None, input_RH: Tensor, key_R: Tensor | None, grad_hidden_RF: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the hidden activation, and the gradient of its input, for one of the output."""
    if activate is None:  # the input was overwritten by the activation
        return input_RH, torch.ops.aten.threshold_backward(grad_hidden_RF, input_RH, 0)
    with torch.enable_grad():
        input_RH = input_RH.detach().requires_grad_()
        hidden_RF = activate(input_RH, key_R)
    (grad_input_RH,) = torch.autograd.grad(hidden_RF, input_RH, grad_hidden_RF)
    return hidden_RF.detach(), grad_input_RH


def _times(values_RD: Tensor, gate_R1: Tensor) -> Tensor:
    return torch.mul(values_RD, gate_R1, out=torch.empty_like(values_RD))


def _part(key_R: Tensor | None, rows: slice) -> Tensor | None:
    return None if key_R is None else key_R[rows]
