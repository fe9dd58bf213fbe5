"""First come, first served must not depend on how sequences are cut over ranks."""

import pytest
import torch

from megatron_switch.moe.sequence_shards import SequenceChunk, SequenceShards, earlier_counts

NUM_SEQUENCES, NUM_EXPERTS, LENGTH = 3, 4, 24


def test_context_parallel_ranks_hold_first_and_last_piece():
    shards = SequenceShards.of(4, tensor_size=1, context_size=2)
    assert shards.chunks_NK == (
        (
            SequenceChunk(position=0, offset=0, length=2),
            SequenceChunk(position=6, offset=2, length=2),
        ),
        (
            SequenceChunk(position=2, offset=0, length=2),
            SequenceChunk(position=4, offset=2, length=2),
        ),
    )
    assert shards.positions(0).tolist() == [0, 1, 6, 7]


@pytest.mark.parametrize(("tensor_size", "context_size"), [(1, 1), (4, 1), (1, 3), (2, 2), (3, 2)])
def test_every_position_is_held_once(tensor_size, context_size):
    num_ranks = tensor_size * context_size
    shards = SequenceShards.of(
        LENGTH // num_ranks, tensor_size=tensor_size, context_size=context_size
    )
    held = torch.cat([shards.positions(rank) for rank in range(num_ranks)])
    assert sorted(held.tolist()) == list(range(LENGTH))


@pytest.mark.parametrize("group", ["sequence", "microbatch", "ep"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(("tensor_size", "context_size"), [(1, 1), (4, 1), (1, 3), (2, 2), (3, 2)])
def test_earlier_counts_equal_a_count_over_the_whole_batch(
    tensor_size, context_size, num_microbatches, group
):
    torch.manual_seed(0)
    shape = (num_microbatches, NUM_SEQUENCES, LENGTH)
    expert_MBS = torch.randint(NUM_EXPERTS, shape)
    num_shards = tensor_size * context_size
    shards = SequenceShards.of(
        LENGTH // num_shards, tensor_size=tensor_size, context_size=context_size
    )
    counts_NBKE = torch.stack(
        [
            _count_chunks(expert_MBS[microbatch], shards, shard)
            for microbatch in range(num_microbatches)
            for shard in range(num_shards)
        ]
    )
    for rank in range(num_microbatches * num_shards):
        earlier_BKE = earlier_counts(counts_NBKE, shards.order(), rank=rank, group=group)
        microbatch, shard = divmod(rank, num_shards)
        for b in range(NUM_SEQUENCES):
            for k, chunk in enumerate(shards.chunks_NK[shard]):
                if chunk.length:
                    expected_E = _count_before(expert_MBS, (microbatch, b, chunk.position), group)
                    assert torch.equal(earlier_BKE[b, k], expected_E)


def _count_chunks(expert_BS, shards, rank):
    counts_BKE = torch.zeros(NUM_SEQUENCES, shards.num_chunks, NUM_EXPERTS, dtype=torch.int64)
    for k, chunk in enumerate(shards.chunks_NK[rank]):
        for b in range(NUM_SEQUENCES):
            held = expert_BS[b, chunk.position : chunk.position + chunk.length]
            counts_BKE[b, k] = torch.bincount(held, minlength=NUM_EXPERTS)
    return counts_BKE


def _count_before(expert_MBS, place, group):
    microbatch, sequence, position = place
    before = expert_MBS[microbatch, sequence, :position]
    if group != "sequence":
        before = torch.cat([expert_MBS[microbatch, :sequence].flatten(), before])
    if group == "ep":
        before = torch.cat([expert_MBS[:microbatch].flatten(), before])
    return torch.bincount(before, minlength=NUM_EXPERTS)
