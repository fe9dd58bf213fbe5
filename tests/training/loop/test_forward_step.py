"""Micro-batches are numbered the same in every layout, and a loss counts the tokens it should."""

from argparse import Namespace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron_switch.moe.counter_rng import mix
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.training.loop import forward_step
from megatron_switch.training.loop.forward_step import (
    KEYS,
    ForwardStep,
    masked_loss,
    over_context_ranks,
)

SEED = 7
NOTHING = dict.fromkeys(KEYS)


class Chunk(nn.Module):
    """A model chunk that computes nothing."""

    def __init__(self, vp_stage=None):
        super().__init__()
        self.vp_stage = vp_stage

    def forward(self, *_, **__):
        return torch.zeros(1)


class Rank:
    """One data-parallel rank, as the forward step sees it."""

    def __init__(self, monkeypatch, replica, replicas, micro_batches):
        self.args = Namespace(curr_iteration=0, do_valid=True, multiple_validation_sets=False)
        self.keys = []
        self.step = ForwardStep(seed=SEED, keyed=True)
        mpu = forward_step.parallel_state
        monkeypatch.setattr(forward_step, "get_args", lambda: self.args)
        monkeypatch.setattr(forward_step, "get_num_microbatches", lambda: micro_batches)
        monkeypatch.setattr(forward_step, "set_step_key", self.keys.append)
        monkeypatch.setattr(forward_step, "read_micro_batch", lambda *_, **__: NOTHING)
        monkeypatch.setattr(mpu, "get_data_parallel_rank", lambda: replica)
        monkeypatch.setattr(mpu, "get_data_parallel_world_size", lambda: replicas)

    def run(self, *chunks, iteration=0, data=None):
        """Send one micro-batch through each chunk; return the keys that were set."""
        self.args.curr_iteration = iteration
        self.keys.clear()
        for chunk in chunks:
            self.step(data, chunk)
        return list(self.keys)


def key(iteration, micro_batch):
    return int(mix(SEED, iteration, micro_batch))


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_micro_batch_has_one_number_whoever_computes_it(monkeypatch, replicas):
    model, found = Chunk(), {}
    for replica in range(replicas):
        rank = Rank(monkeypatch, replica, replicas, 4 // replicas)
        for local, set_key in enumerate(rank.run(*[model] * (4 // replicas), iteration=3)):
            found[local * replicas + replica] = set_key
    assert found == {number: key(3, number) for number in range(4)}


def test_numbers_begin_anew_with_an_iteration(monkeypatch):
    rank = Rank(monkeypatch, 0, 1, 2)
    model = Chunk()
    assert rank.run(model, model) == [key(0, 0), key(0, 1)]
    assert rank.run(model, model, iteration=1) == [key(1, 0), key(1, 1)]


def test_an_iteration_that_is_run_again_has_the_same_numbers(monkeypatch):
    rank = Rank(monkeypatch, 0, 1, 2)
    assert rank.run(*[Chunk()] * 4) == [key(0, 0), key(0, 1)] * 2


def test_every_chunk_of_a_stage_counts_for_itself(monkeypatch):
    rank = Rank(monkeypatch, 0, 1, 2)
    first, second = Chunk(0), Chunk(1)
    keys = rank.run(first, second, first, second)
    assert keys == [key(0, 0), key(0, 0), key(0, 1), key(0, 1)]


def test_evaluation_and_a_model_without_noise_set_no_key(monkeypatch):
    rank = Rank(monkeypatch, 0, 1, 2)
    assert rank.run(Chunk().eval()) == []
    rank.step = ForwardStep(seed=SEED, keyed=False)
    assert rank.run(Chunk()) == []


def test_the_split_is_told_from_the_order_of_the_iterators(monkeypatch):
    rank = Rank(monkeypatch, 0, 1, 1)
    first, second = Chunk(0).eval(), Chunk(1).eval()
    assert rank.step.evaluated_split() == 0  # this rank has read nothing
    validation, test = object(), object()
    rank.run(first, first, data=validation)
    rank.run(second, data=object())  # another chunk reads by an iterator of its own
    assert rank.step.evaluated_split() == 0
    rank.run(first, data=test)
    assert rank.step.evaluated_split() == 1
    rank.args.multiple_validation_sets = True
    assert rank.step.evaluated_split() == 0


def test_without_validation_data_the_first_split_is_test(monkeypatch):
    rank = Rank(monkeypatch, 0, 1, 1)
    rank.args.do_valid = False
    rank.run(Chunk().eval(), data=object())
    assert rank.step.evaluated_split() == 1


def test_masked_loss_sums_the_tokens_that_count():
    loss_BS = torch.tensor([[1.0, 2.0], [4.0, 8.0]], requires_grad=True)
    mask_BS = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    total, num_tokens, logged = masked_loss(mask_BS, loss_BS)
    assert (total.item(), num_tokens.item()) == (13.0, 3)
    assert num_tokens.dtype == torch.int
    assert logged["lm loss"].tolist() == [13.0, 3.0]
    assert not logged["lm loss"].requires_grad
    total.backward()
    torch.testing.assert_close(loss_BS.grad, mask_BS)


def test_masked_loss_of_bf16_is_summed_in_fp32():
    loss_BS = torch.full((1, 1024), 1.01, dtype=torch.bfloat16)
    total, _, logged = masked_loss(torch.ones(1, 1024), loss_BS)
    assert total.dtype == logged["lm loss"].dtype == torch.float32
    torch.testing.assert_close(total, loss_BS.float().sum())


@pytest.mark.parametrize("per_token", [False, True])
def test_the_mean_of_a_sequence_that_is_cut_is_the_mean_of_the_whole(per_token):
    """Megatron's is the mean of the parts' means, which is another number."""
    run_ranks(_check_context_mean, 2, per_token)


def _check_context_mean(rank, per_token):
    size, num_tokens = 2, 4  # in the loss: one on the first rank, three on the second
    losses_S = torch.tensor([[1.0, 9.0, 9.0], [2.0, 3.0, 4.0]])[rank].requires_grad_()
    mask_S = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])[rank]
    parallel_state.initialize_model_parallel(
        context_parallel_size=size, create_gloo_process_groups=False
    )
    forward_step.get_args = lambda: Namespace(calculate_per_token_loss=per_token)
    loss = over_context_ranks(partial(masked_loss, mask_S))
    total, counted, logged = loss(losses_S)
    if per_token:  # Megatron divides by the tokens of all ranks itself
        (total / num_tokens).backward()
    else:  # and here by what the loss function counted, and by the number of ranks
        (total / counted / size).backward()
    torch.testing.assert_close(losses_S.grad, mask_S / num_tokens)
    sums = logged["lm loss"].clone()
    dist.all_reduce(sums)
    assert (sums[0] / sums[1]).item() == 2.5
