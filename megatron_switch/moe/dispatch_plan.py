"""Which row of a dispatch goes where: index arithmetic, no communication, no [T, E] map.

A plan says in which order rows are sent, to whom, and how the receiver sorts them by expert. Packed
and padded dispatch differ in their plan only. Expert ``e`` lives on expert-parallel rank
``e // local_experts``; with expert-tensor parallelism each token is sent to all ranks that hold a
shard of its expert (they are neighbours in the group), and their partial outputs are summed.

Rows may be sent in several chunks, so that one chunk travels while experts work on another. Every
chunk holds about the same number of rows of every expert.

Shape letters:

    T  tokens of this rank          E, e  experts, local experts
    P  expert-parallel ranks        K  copies of a token: expert-tensor-parallel ranks
    N  peers in an exchange, P * K  C  slots per expert and group
    G  capacity groups              W  chunks
    R  rows sent or received
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_switch.moe.exchange import RowMap
from megatron_switch.upstream.private import with_values


@dataclass(frozen=True)
class ExpertGrid:
    """How the experts of a layer are spread over the ranks that exchange tokens."""

    num_experts: int
    expert_parallel: int
    expert_tensor_parallel: int

    @property
    def local_experts(self) -> int:
        """Experts of which one rank holds (a shard of) the weights."""
        return self.num_experts // self.expert_parallel

    @property
    def peers(self) -> int:
        """Ranks in the exchange; expert-tensor rank varies fastest."""
        return self.expert_parallel * self.expert_tensor_parallel


@dataclass(frozen=True)
class ExchangeChunk:
    """The part of an exchange that travels at one time."""

    send: list[int]
    """Rows for each peer."""
    receive: list[int]
    """Rows from each peer."""
    sort: RowMap | None
    """From the order in which rows are received to that of experts; None where they agree."""
    tokens_per_expert_e: Tensor
    """Rows of each local expert, int64, on the CPU and never a fake tensor."""


@dataclass(frozen=True)
class DispatchPlan:
    """How this rank's tokens reach their experts; combine is its transpose."""

    pack: RowMap
    """From tokens to sent rows, chunk by chunk, ordered by peer and expert inside a chunk."""
    chunks: tuple[ExchangeChunk, ...]


def packed_keys(
    expert_T: Tensor, slot_T: Tensor, kept_T: Tensor, *, num_experts: int, num_chunks: int
) -> Tensor:
    """Return what tokens are sorted by: chunk, then expert; dropped ones last. int64, (T,)."""
    # Slots are dealt to chunks in turn, so every chunk gets an even share of each expert.
    key_T = (slot_T % num_chunks) * num_experts + expert_T
    return torch.where(kept_T, key_T, num_chunks * num_experts)


def count_keys(key_T: Tensor, *, num_experts: int, num_chunks: int) -> Tensor:
    """Return the kept tokens of each chunk and expert: int64, shape (W, E)."""
    # Not bincount: on CUDA it waits for the device. The last bin takes the dropped tokens.
    bins = torch.zeros(num_chunks * num_experts + 1, dtype=torch.int64, device=key_T.device)
    bins.scatter_add_(0, key_T, torch.ones_like(key_T))
    return bins[:-1].view(num_chunks, num_experts)


def packed_plan(
    key_T: Tensor, counts_WE: Tensor, received_NWe: Tensor, *, grid: ExpertGrid
) -> DispatchPlan:
    """Plan an exchange in which only kept tokens travel.

    Row counts are read by the host here, in one copy: the only wait for the device.

    Args:
        key_T: From :func:`packed_keys`.
        counts_WE: From :func:`count_keys`.
        received_NWe: The part of every peer's counts that concerns this rank's experts.
        grid: Where experts live.

    Returns:
        The plan.
    """
    num_chunks = counts_WE.shape[0]
    counts_WPe = counts_WE.view(num_chunks, grid.expert_parallel, grid.local_experts)
    host = torch.cat([counts_WE.flatten(), received_NWe.flatten()]).cpu()
    sent_host, received_host = torch.split(host, [counts_WE.numel(), received_NWe.numel()])
    send_WN = (
        sent_host.view(counts_WPe.shape)
        .sum(dim=2)
        .repeat_interleave(grid.expert_tensor_parallel, dim=1)
    )
    received_host_NWe = received_host.view(received_NWe.shape)

    pack = _pack_kept(
        key_T, counts_WPe, copies=grid.expert_tensor_parallel, rows=int(send_WN.sum())
    )
    chunks = []
    for w in range(num_chunks):
        arriving_Ne = received_host_NWe[:, w]
        chunks.append(
            ExchangeChunk(
                send=send_WN[w].tolist(),
                receive=arriving_Ne.sum(dim=1).tolist(),
                sort=_sort_by_expert(received_NWe[:, w], rows=int(arriving_Ne.sum())),
                tokens_per_expert_e=arriving_Ne.sum(dim=0),
            )
        )
    return DispatchPlan(pack, tuple(chunks))


def padded_plan(
    place_T: Tensor,
    *,
    capacity: int,
    num_groups: int,
    shard: int,
    num_shards: int,
    num_chunks: int,
    grid: ExpertGrid,
) -> DispatchPlan:
    """Plan an exchange in which every slot travels, filled or not; shapes depend on no value.

    Args:
        place_T: Place of each token among all slots, ``(expert * G + group) * C + slot``, -1 where
            it has none. The tokens of all ranks that share the capacity groups.
        capacity: Slots per expert and group.
        num_groups: Capacity groups.
        shard: Which share of each expert's slots this rank serves.
        num_shards: Ranks that share the capacity groups.
        num_chunks: Chunks asked for; there are fewer where a rank serves fewer slots.
        grid: Where experts live.

    Returns:
        The plan. ``pack.copies`` has a row for every entry of ``place_T``.
    """
    served = -(-capacity // num_shards)  # slots per expert and group that this rank serves
    step = -(-served // num_chunks)
    widths = [min(step, served - start) for start in range(0, served, step)]
    local_experts, device = grid.local_experts, place_T.device

    slot_T = place_T % capacity - shard * served
    expert_T, group_T = ((place_T // capacity) // num_groups, (place_T // capacity) % num_groups)
    mine_T = (place_T >= 0) & (slot_T >= 0) & (slot_T < served)
    # Every chunk takes ``step`` slots of each expert and group, the last one what is left.
    chunk_T = slot_T // step
    width_T = torch.where(chunk_T == len(widths) - 1, widths[-1], step)
    # Rows of a chunk are laid out as [expert-parallel rank, copy, local expert, group, slot].
    copy_K = torch.arange(grid.expert_tensor_parallel, device=device)
    peer_TK = (expert_T // local_experts * grid.expert_tensor_parallel)[:, None] + copy_K
    block_TK = peer_TK * local_experts + (expert_T % local_experts)[:, None]
    rows_per_slot = grid.peers * local_experts * num_groups
    row_TK = (chunk_T * step * rows_per_slot + group_T * width_T + slot_T % step)[
        :, None
    ] + block_TK * (num_groups * width_T)[:, None]

    num_rows = rows_per_slot * served
    copies_TK = torch.where(mine_T[:, None], row_TK, -1)
    source = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=device)
    token_TK = torch.arange(len(place_T), device=device)[:, None].expand_as(copies_TK)
    # Tokens served by other ranks all write to one more row, which is cut off.
    source.scatter_(0, torch.where(mine_T[:, None], row_TK, num_rows).flatten(), token_TK.flatten())
    pack = RowMap(source[:num_rows], copies_TK, source_has_gaps=True, copies_have_gaps=True)
    return DispatchPlan(
        pack, tuple(_padded_chunk(num_groups * width, grid, device) for width in widths)
    )


def _pack_kept(key_T: Tensor, counts_WPe: Tensor, *, copies: int, rows: int) -> RowMap:
    """Sort the kept tokens and repeat each peer's block once for every copy."""
    num_tokens, device = key_T.numel(), key_T.device
    order_T = key_T.argsort(stable=True)  # kept tokens first, by chunk and expert
    if copies == 1:
        source_R = order_T[:rows]
        place_R = source_R
    else:
        length_WP = counts_WPe.sum(dim=2).flatten()
        start_WP = length_WP.cumsum(0) - length_WP
        # The block of an expert-parallel rank follows once for each of its tensor ranks.
        length_WPK = length_WP.repeat_interleave(copies)
        source_R = order_T[_segments(start_WP.repeat_interleave(copies), length_WPK, rows)]
        copy_WPK = torch.arange(copies, device=device).repeat(length_WP.numel())
        place_R = source_R * copies + torch.repeat_interleave(
            copy_WPK, length_WPK, output_size=rows
        )
    copies_TK = torch.full((num_tokens * copies,), -1, dtype=torch.int64, device=device)
    copies_TK[place_R] = torch.arange(rows, device=device)
    copies_TK = copies_TK.view(num_tokens, copies)
    return RowMap(source_R, copies_TK, source_has_gaps=False, copies_have_gaps=True)


def _sort_by_expert(received_Ne: Tensor, *, rows: int) -> RowMap | None:
    """Return the map from (peer, expert) to (expert, peer) order."""
    if 1 in received_Ne.shape:  # one peer or one expert: nothing to sort
        return None
    length = received_Ne.flatten()
    start_Ne = (length.cumsum(0) - length).view_as(received_Ne)
    return RowMap.permutation(_segments(start_Ne.t().flatten(), received_Ne.t().flatten(), rows))


def _segments(start: Tensor, length: Tensor, total: int) -> Tensor:
    """Concatenate ``arange(start[i], start[i] + length[i])`` for all i; ``total`` long."""
    # The total is given, because to sum the lengths would wait for the device.
    shift = start - (length.cumsum(0) - length)
    repeated = torch.repeat_interleave(shift, length, output_size=total)
    return torch.arange(total, device=start.device) + repeated


def _padded_chunk(rows_per_expert: int, grid: ExpertGrid, device: torch.device) -> ExchangeChunk:
    """Return a chunk of ``rows_per_expert`` rows for every peer and local expert."""
    local_experts = grid.local_experts
    sort = None
    if grid.peers > 1 and local_experts > 1:
        received = torch.arange(grid.peers * local_experts * rows_per_expert, device=device)
        by_peer = received.view(grid.peers, local_experts, rows_per_expert)
        sort = RowMap.permutation(by_peer.transpose(0, 1).flatten())
    rows_per_peer = [local_experts * rows_per_expert] * grid.peers
    # The host reads these static numbers, also where all other tensors are fake.
    with with_values():
        tokens_per_expert_e = torch.full(
            (local_experts,), grid.peers * rows_per_expert, dtype=torch.int64, device="cpu"
        )
    return ExchangeChunk(rows_per_peer, rows_per_peer, sort, tokens_per_expert_e)
