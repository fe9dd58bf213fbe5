"""Attention over a sequence that is cut is attention over the whole one."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.moe.sequence_shards import SequenceShards
from megatron_switch.testing.context_attention import ContextAttention
from megatron_switch.testing.ranks import run_ranks

S, B, H, G, N = 16, 2, 4, 2, 3


def attention(ranks):
    config = SimpleNamespace(attention_dropout=0.0, window_size=None, kv_channels=N)
    groups = SimpleNamespace(cp=ranks)
    return ContextAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


def by_the_formula(query, key, value):
    """Softmax over keys that are not later, one head at a time."""
    key, value = (part.repeat_interleave(H // G, dim=2) for part in (key, value))
    scores = torch.einsum("sbhn,kbhn->bhsk", query, key) / N**0.5
    later = torch.ones(S, S).triu(1).bool()
    weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhsk,kbhn->sbhn", weights, value).flatten(2)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_undivided_sequence(num_ranks):
    run_ranks(_check_attention, num_ranks)


def _check_attention(rank):
    with cuda_on_cpu():  # Megatron gathers into tensors of the GPU
        _compare(rank)


def _compare(rank):
    whole = [torch.randn(S, B, heads, N, dtype=torch.float64) for heads in (H, G, G)]
    gradient = torch.randn(S, B, H * N, dtype=torch.float64)
    leaves = [part.clone().requires_grad_() for part in whole]
    expected = by_the_formula(*leaves)
    expected.backward(gradient)

    world = dist.group.WORLD
    shards = SequenceShards.of(S // world.size(), tensor_size=1, context_size=world.size())
    mine = shards.positions(rank)
    parts = [part[mine].clone().requires_grad_() for part in whole]
    actual = attention(world)(*parts, attention_mask=None)
    actual.backward(gradient[mine])

    torch.testing.assert_close(actual, expected[mine])
    for part, leaf in zip(parts, leaves, strict=True):
        torch.testing.assert_close(part.grad, leaf.grad[mine])


@pytest.mark.parametrize("given", [{"attention_mask": torch.ones(1)}, {"packed_seq_params": 1}])
def test_what_it_does_not_know_is_refused(given):
    parts = (torch.zeros(2, 1, H, N), torch.zeros(2, 1, G, N), torch.zeros(2, 1, G, N))
    with pytest.raises(AssertionError):
        attention(None)(*parts, **{"attention_mask": None, **given})
