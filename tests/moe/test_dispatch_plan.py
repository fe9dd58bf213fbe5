"""A plan sends every kept token to every holder of its expert, once, in the order of experts."""

import pytest
import torch

from megatron_switch.moe.dispatch_plan import (
    ExpertGrid,
    count_keys,
    packed_keys,
    packed_plan,
    padded_plan,
)

GRID = ExpertGrid(num_experts=4, expert_parallel=2, expert_tensor_parallel=2)


def packed(expert_T, slot_T, kept_T, *, num_chunks, grid=GRID):
    """Return a plan in which every peer sends what this rank sends to expert-parallel rank 0."""
    sizes = {"num_experts": grid.num_experts, "num_chunks": num_chunks}
    key_T = packed_keys(expert_T, slot_T, kept_T, **sizes)
    counts_WE = count_keys(key_T, **sizes)
    received_NWe = counts_WE[None, :, : grid.local_experts].expand(grid.peers, -1, -1)
    return packed_plan(key_T, counts_WE, received_NWe, grid=grid)


def test_packed_rows_by_hand():
    expert_T = torch.tensor([2, 0, 0, 1, 0, 3])
    slot_T = torch.tensor([0, 0, 1, 0, 2, 0])
    kept_T = slot_T < 2
    plan = packed(expert_T, slot_T, kept_T, num_chunks=1)
    # Rank 0 of the experts' grid holds experts 0 and 1, and each block is sent to both its shards.
    assert plan.pack.source.tolist() == [1, 2, 3, 1, 2, 3, 0, 5, 0, 5]
    assert plan.pack.copies.tolist() == [[6, 8], [0, 3], [1, 4], [2, 5], [-1, -1], [7, 9]]
    (chunk,) = plan.chunks
    assert chunk.send == [3, 3, 2, 2]
    assert chunk.receive == [3, 3, 3, 3]
    # Each peer sent two rows for expert 0, then one for expert 1.
    assert chunk.sort.source.tolist() == [0, 1, 3, 4, 6, 7, 9, 10, 2, 5, 8, 11]
    assert chunk.tokens_per_expert_e.tolist() == [8, 4]


def test_packed_chunks_hold_about_the_same_rows_of_every_expert():
    expert_T = torch.randint(4, (101,))
    slot_T = torch.zeros_like(expert_T)
    for expert in range(4):
        slot_T[expert_T == expert] = torch.arange(int((expert_T == expert).sum()))
    plan = packed(expert_T, slot_T, slot_T < 20, num_chunks=3)
    rows_WE = [torch.bincount(expert_T[part], minlength=4) for part in _rows_of_chunks(plan)]
    assert all((a - b).abs().max() <= 2 for a in rows_WE for b in rows_WE)  # two copies of each
    assert sum(len(part) for part in _rows_of_chunks(plan)) == 2 * int((slot_T < 20).sum())


def _rows_of_chunks(plan):
    return torch.split(plan.pack.source, [sum(chunk.send) for chunk in plan.chunks])


def test_packed_plan_of_no_token():
    empty_T = torch.empty(0, dtype=torch.int64)
    plan = packed(empty_T, empty_T, empty_T.bool(), num_chunks=2)
    assert plan.pack.source.shape == (0,)
    assert plan.pack.copies.shape == (0, 2)
    assert [chunk.send for chunk in plan.chunks] == [[0] * 4] * 2


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 9])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_padded_slots_are_served_once_and_laid_out_by_peer_and_expert(num_shards, num_chunks):
    capacity, num_groups = 5, 2
    places = torch.randperm(4 * num_groups * capacity)[:23]
    place_T = torch.where(torch.arange(23) % 4 == 0, -1, places)
    served = torch.zeros(23, dtype=torch.int64)
    for shard in range(num_shards):
        plan = padded_plan(
            place_T,
            capacity=capacity,
            num_groups=num_groups,
            shard=shard,
            num_shards=num_shards,
            num_chunks=num_chunks,
            grid=GRID,
        )
        assert len(plan.chunks) == min(num_chunks, -(-capacity // num_shards))
        _check_layout(plan, place_T // (num_groups * capacity))
        served += (plan.pack.copies >= 0).sum(dim=1)
        rows = torch.arange(len(plan.pack.source))
        filled = plan.pack.source >= 0
        copies = plan.pack.copies[plan.pack.source[filled]]
        assert (copies == rows[filled, None]).any(dim=1).all()
    assert torch.equal(served, torch.where(place_T >= 0, 2, 0))


def _check_layout(plan, expert_T):
    """Rows of a chunk: for each peer, for each of its experts, the same number."""
    for rows, chunk in zip(_rows_of_chunks(plan), plan.chunks, strict=True):
        assert len(set(chunk.send)) == 1
        blocks = rows.view(2, 2, 2, -1)  # expert-parallel rank, copy, local expert, group and slot
        assert torch.equal(blocks[:, 0], blocks[:, 1])
        for rank in range(2):
            for local in range(2):
                tokens = blocks[rank, 0, local]
                assert (expert_T[tokens[tokens >= 0]] == rank * 2 + local).all()
        per_expert = GRID.peers * blocks.shape[3]
        assert chunk.tokens_per_expert_e.tolist() == [per_expert] * 2
        arrival = torch.arange(len(rows)).view(4, 2, -1)
        assert torch.equal(chunk.sort.source, arrival.transpose(0, 1).flatten())
