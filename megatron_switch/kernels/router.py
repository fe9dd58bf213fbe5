"""The router's softmax: expert, gate, logsumexp and the column sums of the probabilities.

Forward reads the logits once and backward reads them once more; the probabilities, a [T, E] matrix,
are never written. Backward takes the gradients of all three differentiable results and writes that
of the logits, so neither loss costs a pass of its own. For backward the logits and an index per
token are kept.

Guaranteed, as in :mod:`megatron_switch.moe.routing`:

* The largest *probability* wins, not the largest logit: what rounds to a tie is one, and ties go to
  the lowest expert. A row with NaN gets expert 0 and a gate of NaN.
* Sums over tokens are taken in a fixed order: no floating-point atomics, the same bits every time.

Shape letters:

    T  tokens, in first-come order    E  experts in the whole layer
    G  groups: consecutive runs of T / G tokens, over each of which balance is measured
    N  parts of a group, one program each
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_switch.kernels.launch import launch, vector

_TILE = 1024
"""Logits that a program holds in registers, where a row is not longer: 8 a thread."""
_LEAST_ROWS = 16
"""Least tokens of a part: column sums written are at most 1/16 of the logits read."""


@dataclass(frozen=True)
class TopExpert:
    """What the router decides for T tokens, and what its losses are made of."""

    expert_T: Tensor
    """Most probable expert, int64; padding rows hold one too."""
    gate_T: Tensor
    """Its probability, float32, differentiable."""
    logsumexp_T: Tensor
    """Logarithm of the sum of exponentials of a token's logits, float32, differentiable."""
    prob_sum_GE: Tensor
    """Probabilities summed over the real tokens of each group, float32, differentiable."""


def top_expert(
    logits_TE: Tensor, *, num_groups: int = 1, padding_T: Tensor | None = None
) -> TopExpert:
    """Return each token's most probable expert, and the sums that the losses need.

    The load-balancing loss of a group is ``sum_e weight_ge * prob_sum_ge``; the z-loss is a mean of
    ``logsumexp_T`` squared.

    Args:
        logits_TE: Router logits, shape (T, E), float32. Made for up to some thousand experts: a
            program holds a whole row.
        num_groups: Groups, each of T / G consecutive tokens.
        padding_T: True for padding, shape (T,), bool; padding is in no column sum.

    Returns:
        Expert, gate, logsumexp and column sums.
    """
    num_tokens, num_experts = logits_TE.shape
    assert logits_TE.dtype == torch.float32, logits_TE.dtype
    assert num_experts > 0, "a router has experts"
    assert num_tokens % num_groups == 0, (num_tokens, num_groups)
    if padding_T is not None:
        padding_T = vector(padding_T, num_tokens)
    return TopExpert(*_TopExpert.apply(logits_TE, num_groups, padding_T))


class _TopExpert(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, num_groups: int, padding_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        num_tokens, num_experts = logits_TE.shape
        group_size = num_tokens // num_groups
        tile_rows, block_experts = _tile(num_experts)
        rows = max(tile_rows, _LEAST_ROWS)
        num_parts = triton.cdiv(group_size, rows)

        expert_T = logits_TE.new_empty(num_tokens, dtype=torch.int64)
        gate_T, logsumexp_T = logits_TE.new_empty(num_tokens), logits_TE.new_empty(num_tokens)
        sums_GNE = logits_TE.new_empty(num_groups, num_parts, num_experts)
        launch(
            _forward_kernel,
            (num_parts, num_groups),
            *(logits_TE, padding_T, expert_T, gate_T, logsumexp_T, sums_GNE),
            *(group_size, num_experts),
            ROWS=rows,
            TILE_ROWS=tile_rows,
            BLOCK_E=block_experts,
        )
        ctx.save_for_backward(logits_TE, expert_T, padding_T)
        ctx.num_groups = num_groups
        ctx.mark_non_differentiable(expert_T)
        return expert_T, gate_T, logsumexp_T, sums_GNE.sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: None, grad_gate_T: Tensor, grad_logsumexp_T: Tensor, grad_sum_GE: Tensor
    ) -> tuple[Tensor, None, None]:
        logits_TE, expert_T, padding_T = ctx.saved_tensors
        num_tokens, num_experts = logits_TE.shape
        tile_rows, block_experts = _tile(num_experts)
        grad_logits_TE = torch.empty_like(logits_TE)
        launch(
            _backward_kernel,
            (triton.cdiv(num_tokens, tile_rows),),
            *(logits_TE, padding_T, expert_T),
            *(grad_gate_T.contiguous(), grad_logsumexp_T.contiguous(), grad_sum_GE.contiguous()),
            *(grad_logits_TE, num_tokens, num_tokens // ctx.num_groups, num_experts),
            TILE_ROWS=tile_rows,
            BLOCK_E=block_experts,
        )
        return grad_logits_TE, None, None


def _tile(num_experts: int) -> tuple[int, int]:
    """Return rows and columns of a tile; a column for every expert."""
    block_experts: int = triton.next_power_of_2(num_experts)
    return max(1, _TILE // block_experts), block_experts


@triton.jit
def _tile_of_rows(exists, num_experts, BLOCK_E: tl.constexpr):
    """Return offsets of a tile behind its first row, and which of its elements exist."""
    column = tl.arange(0, BLOCK_E)
    offset = tl.arange(0, exists.shape[0])[:, None] * num_experts + column[None, :]
    return offset, exists[:, None] & (column < num_experts)[None, :]


@triton.jit
def _softmax(logits_ptr, exists, num_experts, BLOCK_E: tl.constexpr):
    """Return probabilities, largest logit and sum of exponentials of a tile of rows."""
    offset, inside = _tile_of_rows(exists, num_experts, BLOCK_E)
    logits = tl.load(logits_ptr + offset, mask=inside, other=float("-inf"))
    logits = tl.where(exists[:, None], logits, 0.0)  # rows past the end must not become NaN
    largest = tl.max(logits, axis=1)
    exponential = tl.exp(logits - largest[:, None])
    total = tl.sum(exponential, axis=1)
    return exponential / total[:, None], largest, total


@triton.jit
def _is_real(padding_ptr, row, exists):
    """Return which rows exist and are no padding."""
    real = exists
    if padding_ptr is not None:
        real = exists & (tl.load(padding_ptr + row, mask=exists, other=1) == 0)
    return real


@triton.jit
def _forward_kernel(
    logits_ptr,
    padding_ptr,
    expert_ptr,
    gate_ptr,
    logsumexp_ptr,
    sums_ptr,
    group_size,
    num_experts,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    part, group = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK_E)
    sums = tl.zeros([BLOCK_E], tl.float32)
    for start in range(0, ROWS, TILE_ROWS):
        first = group * group_size + part * ROWS + start
        row = first + tl.arange(0, TILE_ROWS)
        exists = row < (group + 1) * group_size
        tile_ptr = logits_ptr + first.to(tl.int64) * num_experts
        probs, largest, total = _softmax(tile_ptr, exists, num_experts, BLOCK_E)

        # No probability exceeds 1. A row with NaN is NaN throughout, and its first column wins.
        key = tl.where(probs == probs, probs, 2.0)
        key = tl.where((column < num_experts)[None, :], key, -1.0)
        expert = tl.argmax(key, axis=1, tie_break_left=True)
        tl.store(expert_ptr + row, expert.to(tl.int64), mask=exists)
        tl.store(gate_ptr + row, 1.0 / total, mask=exists)  # the largest exponential is exactly 1
        tl.store(logsumexp_ptr + row, largest + tl.log(total), mask=exists)

        real = _is_real(padding_ptr, row, exists)
        sums += tl.sum(tl.where(real[:, None], probs, 0.0), axis=0)
    out = (group * tl.num_programs(0) + part).to(tl.int64) * num_experts + column
    tl.store(sums_ptr + out, sums, mask=column < num_experts)


@triton.jit
def _backward_kernel(
    logits_ptr,
    padding_ptr,
    expert_ptr,
    grad_gate_ptr,
    grad_logsumexp_ptr,
    grad_sum_ptr,
    grad_logits_ptr,
    num_tokens,
    group_size,
    num_experts,
    TILE_ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    first = tl.program_id(0) * TILE_ROWS
    row = first + tl.arange(0, TILE_ROWS)
    exists = row < num_tokens
    first_offset = first.to(tl.int64) * num_experts
    probs, _, _ = _softmax(logits_ptr + first_offset, exists, num_experts, BLOCK_E)

    # The gradient of each probability: of its column sum, and of the gate where it is the largest.
    column = tl.arange(0, BLOCK_E)
    offset, inside = _tile_of_rows(exists, num_experts, BLOCK_E)
    weight_ptr = grad_sum_ptr + (row // group_size * num_experts)[:, None] + column[None, :]
    real = _is_real(padding_ptr, row, exists)
    grad_probs = tl.load(weight_ptr, mask=inside & real[:, None], other=0.0)
    expert = tl.load(expert_ptr + row, mask=exists, other=0)
    grad_gate = tl.load(grad_gate_ptr + row, mask=exists, other=0.0)
    grad_probs += tl.where(column[None, :] == expert[:, None], grad_gate[:, None], 0.0)

    # Softmax: p * (dp - <p, dp>); the derivative of the logsumexp is p.
    grad_logsumexp = tl.load(grad_logsumexp_ptr + row, mask=exists, other=0.0)
    shift = grad_logsumexp - tl.sum(probs * grad_probs, axis=1)
    grad_logits = probs * (grad_probs + shift[:, None])
    tl.store(grad_logits_ptr + first_offset + offset, grad_logits, mask=inside)
