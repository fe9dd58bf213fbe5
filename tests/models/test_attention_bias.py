"""Relative attention bias: Hugging Face's values, this rank's heads, and a whole gradient."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from support.t5_case import CHANNELS, HEADS, t5_config
from support.tiny_gpt import model_parallel
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from megatron_switch.models.attention_bias import (
    BiasedDotProductAttention,
    RelativeAttentionBias,
    hide_keys,
    later_keys,
)
from megatron_switch.testing.ranks import run_ranks

BUCKETS, DISTANCE = 8, 20


def table(bidirectional):
    return RelativeAttentionBias(
        t5_config([0]),
        bidirectional=bidirectional,
        num_buckets=BUCKETS,
        max_distance=DISTANCE,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )


@pytest.mark.parametrize("bidirectional", [True, False], ids=["encoder", "decoder"])
def test_values_are_hugging_face_s(bidirectional):
    run_ranks(_check_values, 1, bidirectional)


def _check_values(rank, bidirectional):
    config = T5Config(
        d_model=12,
        d_kv=CHANNELS,
        num_heads=HEADS,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=DISTANCE,
        is_decoder=not bidirectional,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    with model_parallel():
        ours = table(bidirectional)
        ours.load_state_dict(
            {"relative_attention_bias.weight": theirs.relative_attention_bias.weight}
        )
        for queries, keys in ((30, 30), (1, 9), (9, 50)):
            assert torch.equal(ours(queries, keys), theirs.compute_bias(queries, keys))


def test_ranks_have_their_heads_and_the_whole_gradient(tmp_path):
    run_ranks(_keep_whole, 1, tmp_path / "whole.pt")
    run_ranks(_compare_with_whole, 2, tmp_path / "whole.pt")


def _weights_of_heads():
    return torch.arange(1.0, HEADS + 1)[None, :, None, None]


def _keep_whole(rank, path):
    with model_parallel():
        ours = table(True)
        bias = ours(5, 5)
        (bias * _weights_of_heads()).sum().backward()
        weight = ours.relative_attention_bias.weight
        torch.save({"weight": weight.data, "bias": bias.data, "gradient": weight.grad}, path)


def _compare_with_whole(rank, path):
    whole = torch.load(path, weights_only=True)
    with model_parallel(tensor_model_parallel_size=2):
        ours = table(True)
        weight = ours.relative_attention_bias.weight
        weight.data.copy_(whole["weight"])
        bias = ours(5, 5)
        (bias * _weights_of_heads().chunk(2, dim=1)[rank]).sum().backward()
        assert torch.equal(bias, whole["bias"].chunk(2, dim=1)[rank])
        assert torch.equal(weight.grad, whole["gradient"])


def test_hidden_keys_are_as_low_as_a_number_can_be_and_pass_no_gradient():
    bias = torch.zeros(1, 2, 3, 3, requires_grad=True)
    hidden = hide_keys(bias, later_keys(3, bias.device))
    lowest = torch.finfo(torch.float32).min
    assert hidden[0, 1].tolist() == [[0, lowest, lowest], [0, 0, lowest], [0, 0, 0]]
    hidden.clamp(min=-1.0).sum().backward()
    assert bias.grad[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert hide_keys(bias, None) is bias
    assert torch.isfinite(hide_keys(bias.bfloat16(), torch.tensor(True))).all()


def attention():
    return BiasedDotProductAttention(
        t5_config([0]), 1, AttnMaskType.arbitrary, "self", softmax_scale=1.0
    )


def test_a_bias_in_the_place_of_the_mask_is_added_to_unscaled_scores():
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, 6, 2, HEADS, CHANNELS, generator=generator).double()
    bias = torch.randn(1, HEADS, 6, 6, generator=generator).double().requires_grad_()
    context = attention()(query, key, value, bias)
    scores = torch.einsum("sbhn,kbhn->bhsk", query, key) + bias
    expected = torch.einsum("bhsk,kbhn->sbhn", scores.softmax(-1), value).flatten(2)
    torch.testing.assert_close(context, expected)
    (gradient,) = torch.autograd.grad(context.square().sum(), bias)
    (expected_gradient,) = torch.autograd.grad(expected.square().sum(), bias)
    torch.testing.assert_close(gradient, expected_gradient)


def test_a_query_without_visible_keys_is_a_number():
    query, key, value = torch.randn(3, 4, 1, HEADS, CHANNELS)
    bias = hide_keys(torch.zeros(1, HEADS, 4, 4), torch.ones(1, 1, 1, 4, dtype=torch.bool))
    context = attention()(query, key, value, bias)
    torch.testing.assert_close(context, value.mean(0, keepdim=True).expand_as(value).flatten(2))


def test_a_boolean_mask_hides_keys_as_everywhere():
    query, key, value = torch.randn(3, 4, 1, HEADS, CHANNELS)
    mask = torch.tensor([False, False, True, True])[None, None, None]
    expected = attention()(query, key[:2], value[:2], None)
    torch.testing.assert_close(attention()(query, key, value, mask), expected)
