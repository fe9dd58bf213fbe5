"""First-come slots: a token's position among those of its group that chose the same expert.

Three small kernels: a histogram of every block of tokens, a scan over blocks, and in each block a
comparison of its tokens with each other. Cost is linear in the tokens; the histograms hold
T * E / 64 numbers, and there is no [T, E] map and no sort. Counts fall out of the scan. Integer
arithmetic alone, so the same bits every time.

Groups are consecutive runs of T / G tokens, which is what a rank holds of sequences or of their
chunks; :func:`megatron_switch.moe.routing.assign_slots` takes any.

Shape letters:

    T  tokens, in first-come order    E  experts in the whole layer
    G  groups                         N  blocks of tokens in a group
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_switch.kernels.launch import launch, vector

_BLOCK = 64
"""Tokens of a block: each is compared with all others of its block."""
_LEAST_BINS = 128
"""Bins of the smallest histogram: one a thread."""
_SCAN_BLOCKS, _SCAN_EXPERTS = 64, 32
"""Tile of histograms that a program scans at a time."""


@dataclass(frozen=True)
class Slots:
    """The order of T tokens within their groups and experts, and how many there are."""

    slot_T: Tensor
    """Position within (group, expert), counted from 0, int64; -1 for padding."""
    tokens_per_expert_GE: Tensor
    """Real tokens of each group and expert, int64."""


def first_come_slots(
    expert_T: Tensor, *, num_experts: int, num_groups: int = 1, padding_T: Tensor | None = None
) -> Slots:
    """Number the tokens of each (group, expert) from 0, earlier tokens first. Not differentiable.

    Args:
        expert_T: Chosen experts, shape (T,), int64, in [0, num_experts).
        num_experts: Experts in the whole layer.
        num_groups: Groups, each of T / G consecutive tokens.
        padding_T: True for padding, shape (T,), bool; padding takes no slot.

    Returns:
        Slots and counts.
    """
    num_tokens = expert_T.numel()
    assert num_tokens % num_groups == 0, (num_tokens, num_groups)
    expert_T = vector(expert_T, num_tokens)
    if padding_T is not None:
        padding_T = vector(padding_T, num_tokens)
    group_size = num_tokens // num_groups
    num_blocks = triton.cdiv(group_size, _BLOCK)

    blocks_GNE = expert_T.new_empty((num_groups, num_blocks, num_experts), dtype=torch.int32)
    counts_GE = expert_T.new_empty((num_groups, num_experts), dtype=torch.int64)
    slot_T = torch.empty_like(expert_T)
    grid = (num_blocks, num_groups)
    tokens = (expert_T, padding_T, blocks_GNE)
    launch(
        _histogram_kernel,
        grid,
        *(*tokens, group_size, num_experts),
        BLOCK=_BLOCK,
        BINS=max(_LEAST_BINS, triton.next_power_of_2(num_experts)),
    )
    launch(
        _scan_kernel,
        (triton.cdiv(num_experts, _SCAN_EXPERTS), num_groups),
        *(blocks_GNE, counts_GE, num_blocks, num_experts),
        BLOCK_N=_SCAN_BLOCKS,
        BLOCK_E=_SCAN_EXPERTS,
    )
    launch(_slot_kernel, grid, *(*tokens, slot_T, group_size, num_experts), BLOCK=_BLOCK)
    return Slots(slot_T, counts_GE)


@triton.jit
def _real_tokens(expert_ptr, padding_ptr, group_size, BLOCK: tl.constexpr):
    """Return rows and experts of this program's block; where a row exists, and is no padding."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = place < group_size
    row = tl.program_id(1) * group_size + place
    real = exists
    if padding_ptr is not None:
        real = exists & (tl.load(padding_ptr + row, mask=exists, other=1) == 0)
    expert = tl.load(expert_ptr + row, mask=real, other=0).to(tl.int32)
    return row, expert, exists, real


@triton.jit
def _histogram_kernel(
    expert_ptr,
    padding_ptr,
    blocks_ptr,
    group_size,
    num_experts,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    _, expert, _, real = _real_tokens(expert_ptr, padding_ptr, group_size, BLOCK)
    column = tl.arange(0, BINS)
    block = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    counts = tl.histogram(expert, BINS, mask=real)
    tl.store(blocks_ptr + block * num_experts + column, counts, mask=column < num_experts)


@triton.jit
def _scan_kernel(
    blocks_ptr,
    counts_ptr,
    num_blocks,
    num_experts,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Replace each block's counts by those of earlier blocks, and write the sum of all."""
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    earlier = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_blocks, BLOCK_N):
        block = start + tl.arange(0, BLOCK_N)
        mask = (block < num_blocks)[:, None] & (column < num_experts)[None, :]
        cell = blocks_ptr + (group * num_blocks + block)[:, None] * num_experts + column[None, :]
        counts = tl.load(cell, mask=mask, other=0)
        before = earlier[None, :] + tl.cumsum(counts, axis=0) - counts
        tl.store(cell, before, mask=mask)
        earlier += tl.sum(counts, axis=0)
    out = group * num_experts + column
    tl.store(counts_ptr + out, earlier.to(tl.int64), mask=column < num_experts)


@triton.jit
def _slot_kernel(
    expert_ptr,
    padding_ptr,
    blocks_ptr,
    slot_ptr,
    group_size,
    num_experts,
    BLOCK: tl.constexpr,
):
    row, expert, exists, real = _real_tokens(expert_ptr, padding_ptr, group_size, BLOCK)
    block = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    before = tl.load(blocks_ptr + block * num_experts + expert, mask=real, other=0)

    # Padding compares as an expert that no token has, so it counts for none.
    key = tl.where(real, expert, -1)
    place = tl.arange(0, BLOCK)
    same = (key[:, None] == key[None, :]) & (place[None, :] < place[:, None])
    slot = before + tl.sum(same.to(tl.int32), axis=1)
    tl.store(slot_ptr + row, tl.where(real, slot, -1).to(tl.int64), mask=exists)
