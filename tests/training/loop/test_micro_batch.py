"""Every rank gets its part of a batch: the ends tokens and labels, every stage its padding mask."""

from argparse import Namespace

import pytest
import torch
from megatron.core import parallel_state

from megatron_switch.data.padding import PADDING_MASK
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.moe.sequence_shards import SequenceShards
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.training.loop import forward_step
from megatron_switch.training.loop.forward_step import (
    KEYS,
    LOSS_TOKENS,
    read_micro_batch,
    reads_data,
)

B, S = 2, 16


def arguments(**changes):
    plain = {
        "num_experts": 4,
        "full_validation": False,
        "create_attention_mask_in_dataloader": True,
        "micro_batch_size": B,
        "eval_micro_batch_size": B + 1,
        "seq_length": S,
        "sequence_parallel": True,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "calculate_per_token_loss": False,
    }
    return Namespace(**(plain | changes))


def batch_of(size):
    """A batch whose every value says where it stands."""
    place_BS = torch.arange(size * S).view(size, S)
    return {
        "tokens": place_BS,
        "labels": place_BS + 1000,
        "loss_mask": place_BS.float(),
        "position_ids": place_BS + 2000,
        "attention_mask": (place_BS % 5 == 0)
        .view(size, 1, S, 1)
        .expand(-1, -1, -1, S)
        .contiguous(),
        PADDING_MASK: (place_BS * 7) % 3 == 0,
    }


def start(args, **sizes):
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
    forward_step.get_args = lambda: args  # in a process of this test alone
    return iter([batch_of(B)] * 4) if reads_data(None) else None


@pytest.mark.parametrize("stages", [1, 2])
def test_the_mask_of_a_stage_fits_the_tokens_it_holds(stages):
    run_ranks(_check_masks, 4 * stages, stages)


def _check_masks(rank, stages):
    args = arguments(
        context_parallel_size=2,
        pipeline_model_parallel_size=stages,
        create_attention_mask_in_dataloader=False,
    )
    with cuda_on_cpu():
        data = start(
            args,
            tensor_model_parallel_size=2,
            context_parallel_size=2,
            pipeline_model_parallel_size=stages,
        )
        got = read_micro_batch(data, None, training=True)
    whole = batch_of(B)
    first = parallel_state.is_pipeline_first_stage()
    last = parallel_state.is_pipeline_last_stage()
    shards = SequenceShards.of(S // 4, tensor_size=2, context_size=2)
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    context_rank = parallel_state.get_context_parallel_rank()
    # Tensor rank varies fastest, and a context rank holds what its tensor ranks hold together.
    held = torch.cat([shards.positions(2 * context_rank + r) for r in range(2)])
    mine = held if first else shards.positions(2 * context_rank + tensor_rank)
    assert got[PADDING_MASK].dtype == torch.bool
    assert torch.equal(got[PADDING_MASK], whole[PADDING_MASK][:, mine])
    for key, needed in (("tokens", first), ("labels", last), ("loss_mask", last)):
        assert (got[key] is not None) == needed, key
        if needed:
            assert torch.equal(got[key], whole[key][:, held])
    # On the first stage Megatron's model cuts the mask, and gets what a later stage gets.
    if first:
        cut = got[PADDING_MASK].chunk(2, dim=1)[tensor_rank]
        rest = whole[PADDING_MASK][:, shards.positions(2 * context_rank + tensor_rank)]
        assert torch.equal(cut, rest)


def test_stages_in_the_middle_get_both_masks_and_nothing_else():
    run_ranks(_check_middle, 3)


def _check_middle(rank):
    with cuda_on_cpu():
        args = arguments(pipeline_model_parallel_size=3, sequence_parallel=False)
        data = start(args, pipeline_model_parallel_size=3)
        got = read_micro_batch(data, None, training=True)
        dense = arguments(
            pipeline_model_parallel_size=3,
            num_experts=None,
            create_attention_mask_in_dataloader=False,
        )
        forward_step.get_args = lambda: dense
        assert reads_data(None) == (rank != 1)
        nothing = read_micro_batch(data, None, training=True) if rank == 1 else None
    assert torch.equal(got["attention_mask"], batch_of(B)["attention_mask"])
    assert torch.equal(got[PADDING_MASK], batch_of(B)[PADDING_MASK])
    if rank == 1:
        given = {key for key in KEYS if got[key] is not None}
        assert given == {"attention_mask", PADDING_MASK}
        assert nothing == dict.fromkeys(KEYS)


def test_every_stage_knows_the_tokens_in_the_loss_where_it_is_counted_per_token():
    run_ranks(_check_loss_tokens, 6)


def _check_loss_tokens(rank):
    with cuda_on_cpu():
        args = arguments(pipeline_model_parallel_size=3, create_attention_mask_in_dataloader=False)
        args.calculate_per_token_loss = True
        data = start(args, pipeline_model_parallel_size=3, tensor_model_parallel_size=2)
        got = read_micro_batch(data, None, training=True)
        dense = arguments(pipeline_model_parallel_size=3, num_experts=None)
        dense.calculate_per_token_loss = True
        forward_step.get_args = lambda: dense
        without_experts = read_micro_batch(data, None, training=True)
    assert torch.equal(got[LOSS_TOKENS], batch_of(B)["loss_mask"].sum())
    assert without_experts[LOSS_TOKENS] is None


def test_a_short_batch_has_its_full_size_on_every_rank():
    run_ranks(_check_short, 2)


def _check_short(rank):
    with cuda_on_cpu():
        data = start(arguments(), tensor_model_parallel_size=2)
        assert (data is None) == (rank == 1)
        got = read_micro_batch(data, None, training=False)
    assert got["tokens"].shape == got["loss_mask"].shape == (B + 1, S)
    assert got["attention_mask"].shape == (B + 1, 1, S, S)
    assert not got["loss_mask"][B].any()
    assert got[PADDING_MASK][B].all()
    assert torch.equal(got["tokens"][:B], batch_of(B)["tokens"])


def test_a_batch_that_says_nothing_of_padding_has_none():
    run_ranks(_check_without_mask, 1)


def _check_without_mask(rank):
    with cuda_on_cpu():
        start(arguments(create_attention_mask_in_dataloader=False))
        batch = {key: values for key, values in batch_of(B).items() if key != PADDING_MASK}
        got = read_micro_batch(iter([batch]), None, training=True)
    assert torch.equal(got[PADDING_MASK], torch.zeros(B, S, dtype=torch.bool))


def test_a_pass_over_all_validation_data_is_known_to_every_rank():
    run_ranks(_check_full_validation, 2)


def _check_full_validation(rank):
    with cuda_on_cpu():
        args = arguments(full_validation=True)
        assert start(args, tensor_model_parallel_size=2) is not None
