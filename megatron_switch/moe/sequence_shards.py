"""Which positions of a sequence a rank holds, and how many tokens come before them.

Capacity is first come, first served over a whole group of tokens, and a group may be spread over
ranks: sequence parallelism cuts a sequence into slices, context parallelism into two chunks a rank
(first and last, second and second-last, ...). To number its slots, a rank needs the counts of all
*earlier* tokens that other ranks hold. Here is only the arithmetic, without communication;
:mod:`megatron_switch.moe.capacity_groups` gathers the counts.

A *chunk* is a run of consecutive positions held by one rank. Ranks are numbered as in Megatron's
tensor-and-context group: tensor rank varies fastest.

Shape letters:

    N  ranks whose counts were gathered: micro-batches M times shards of one micro-batch
    B  sequences in a micro-batch     K  chunks a rank (1, or 2 with context parallelism)
    E  experts                        S  positions of a sequence held by this rank
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceChunk:
    """A run of consecutive positions of every sequence, held by one rank."""

    position: int
    """Position in the whole sequence of the chunk's first token."""
    offset: int
    """Index of the chunk's first token among this rank's positions."""
    length: int
    """Number of positions; 0 where a rank has fewer chunks than others."""


@dataclass(frozen=True)
class SequenceShards:
    """How one sequence is spread over tensor- and context-parallel ranks."""

    chunks_NK: tuple[tuple[SequenceChunk, ...], ...]
    """For each rank of the tensor-and-context group, its chunks in local order."""

    @classmethod
    def of(cls, local_length: int, *, tensor_size: int, context_size: int) -> "SequenceShards":
        """Return the shards that Megatron makes.

        Context parallelism cuts first: of ``2 * context_size`` equal pieces, rank ``r`` takes piece
        ``r`` and piece ``2 * context_size - 1 - r``. Sequence parallelism then gives each tensor
        rank one slice of what its context rank holds.

        Args:
            local_length: Positions of a sequence held by one rank.
            tensor_size: Tensor-parallel size, with sequence parallelism where above 1.
            context_size: Context-parallel size.
        """
        ranks = []
        for context_rank in range(context_size):
            held = _context_chunks(local_length * tensor_size, context_rank, context_size)
            for tensor_rank in range(tensor_size):
                ranks.append(_slice_of(held, tensor_rank * local_length, local_length))
        return cls(tuple(ranks))

    @property
    def num_chunks(self) -> int:
        """Chunks a rank, empty ones included; the same on every rank."""
        return len(self.chunks_NK[0])

    def chunk_of_position(self, rank: int) -> Tensor:
        """Return for each local position the chunk it lies in: int64, shape (S,)."""
        parts = [torch.full((c.length,), k) for k, c in enumerate(self.chunks_NK[rank])]
        return torch.cat(parts)

    def positions(self, rank: int) -> Tensor:
        """Return for each local position its place in the whole sequence: int64, shape (S,)."""
        return torch.cat(
            [torch.arange(c.position, c.position + c.length) for c in self.chunks_NK[rank]]
        )

    def order(self) -> Tensor:
        """Return the flat (rank, chunk) indices of all chunks, earliest first: int64, (N * K,)."""
        num_chunks = self.num_chunks
        keyed = [
            (chunk.position, rank * num_chunks + k)
            for rank, chunks in enumerate(self.chunks_NK)
            for k, chunk in enumerate(chunks)
        ]
        return torch.tensor([index for _, index in sorted(keyed)])


def earlier_counts(
    counts_NBKE: Tensor, order: Tensor, *, rank: int, group: Literal["microbatch", "sequence", "ep"]
) -> Tensor:
    """Return how many tokens of each expert come before each of this rank's chunks.

    Args:
        counts_NBKE: Tokens per expert in every chunk of every gathered rank, integers. ``N`` is a
            multiple of the ranks that share one micro-batch; micro-batches are consecutive.
        order: Chunk order inside one micro-batch, from :meth:`SequenceShards.order`.
        rank: This rank's index among the ``N``.
        group: Tokens that share slots: those of one sequence, of one micro-batch
            (batch-major: all of sequence 0 first), or of all gathered micro-batches.

    Returns:
        Shape (B, K, E), dtype of the counts.
    """
    num_ranks, num_sequences, num_chunks, num_experts = counts_NBKE.shape
    num_shards = order.numel() // num_chunks
    num_microbatches = num_ranks // num_shards
    # Shape: [M, B, shards * chunks, E], chunks earliest first.
    ordered = (
        counts_NBKE.view(num_microbatches, num_shards, num_sequences, num_chunks, num_experts)
        .transpose(1, 2)
        .reshape(num_microbatches, num_sequences, num_shards * num_chunks, num_experts)
        .index_select(2, order)
    )
    # A group is a run of chunks along the flattened leading dims; sums restart with each group.
    leading = {"sequence": 2, "microbatch": 1, "ep": 0}[group]
    runs = ordered.flatten(leading, 2)
    before = (runs.cumsum(leading) - runs).view_as(ordered)  # exclusive cumulative sum

    microbatch, shard = divmod(rank, num_shards)
    # argsort inverts the order: where this rank's chunks stand among the sorted ones.
    place = torch.argsort(order)[shard * num_chunks : (shard + 1) * num_chunks]
    return before[microbatch].index_select(1, place)


def _context_chunks(length: int, rank: int, size: int) -> tuple[SequenceChunk, ...]:
    if size == 1:
        return (SequenceChunk(position=0, offset=0, length=length),)
    half = length // 2
    return (
        SequenceChunk(position=rank * half, offset=0, length=half),
        SequenceChunk(position=(2 * size - 1 - rank) * half, offset=half, length=half),
    )


def _slice_of(
    chunks: tuple[SequenceChunk, ...], start: int, length: int
) -> tuple[SequenceChunk, ...]:
    """Return the part ``[start, start + length)`` of chunks; those outside have length 0."""
    parts = []
    for chunk in chunks:
        first = max(start, chunk.offset)
        last = max(first, min(start + length, chunk.offset + chunk.length))
        # An empty part keeps a position: it is sorted like others and counts nothing.
        parts.append(
            SequenceChunk(
                position=chunk.position + max(0, first - chunk.offset),
                offset=first - start,
                length=last - first,
            )
        )
    return tuple(parts)
