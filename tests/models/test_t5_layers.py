"""Which layer of a stack is what, T5's dropout, and what is refused."""

from collections import Counter

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from support.t5_case import t5_config
from support.tiny_gpt import model_parallel

from megatron_switch.errors import ConfigError
from megatron_switch.models.attention_bias import BiasedDotProductAttention
from megatron_switch.models.norms import RMSNorm
from megatron_switch.models.t5_layers import (
    T5MLP,
    FinalNorm,
    check_t5_supported,
    t5_block_spec,
)
from megatron_switch.testing.ranks import run_ranks

MARK = object()


@pytest.mark.parametrize("decoder", [False, True])
def test_every_part_that_t5_does_otherwise_is_exchanged(decoder):
    block = t5_block_spec(t5_config([0, 1]), decoder=decoder, switch_mlp_spec=MARK)
    assert block.layer_norm is FinalNorm
    dense, sparse = (layer.submodules for layer in block.layer_specs)
    for parts in (dense, sparse):
        attentions = [parts.self_attention] + [parts.cross_attention] * decoder
        for attention in attentions:
            assert attention.submodules.core_attention is BiasedDotProductAttention
            assert attention.params["attn_mask_type"] is AttnMaskType.arbitrary
        assert parts.input_layernorm is parts.pre_mlp_layernorm is RMSNorm
        assert (parts.pre_cross_attn_layernorm is RMSNorm) == decoder
    assert dense.mlp.func == T5MLP.as_mlp_submodule
    assert sparse.mlp is MARK
    # Transformer Engine fuses the norm before an MLP into dense layers only.
    assert "pre_mlp_layernorm." in dense.sharded_state_dict_keys_map
    assert "pre_mlp_layernorm." not in sparse.sharded_state_dict_keys_map


@pytest.mark.parametrize(
    ("frequency", "pattern"), [(1, (1, 1, 1)), (2, (1, 0, 1)), ([0, 1, 1], (0, 1, 1))]
)
def test_a_frequency_says_which_layers_have_experts(frequency, pattern):
    config = t5_config([0, 0, 0], moe_layer_freq=frequency)
    for experts, sparse in ((config.num_moe_experts, pattern), (None, (0, 0, 0))):
        config.num_moe_experts = experts
        block = t5_block_spec(config, decoder=True, switch_mlp_spec=MARK)
        assert tuple(layer.submodules.mlp is MARK for layer in block.layer_specs) == sparse


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization": "LayerNorm"}, r"--normalization LayerNorm \(T5 has RMSNorm\)"),
        ({"add_bias_linear": True}, r"biases in linear layers \(add --disable-bias-linear\)"),
        ({"num_query_groups": 2}, r"--group-query-attention"),
        ({"qk_layernorm": True}, r"--qk-layernorm"),
        ({"window_size": (4, 0)}, r"--window-size"),
        ({"attention_backend": AttnBackend.flash}, r"--attention-backend flash"),
    ],
)
def test_what_a_t5_does_not_have_is_refused(changes, message):
    config = t5_config([0, 1])
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"Switch-T5 does not support {message}"):
        check_t5_supported(config)


def test_pipeline_parallelism_is_refused_with_the_reason():
    config = t5_config([0, 1])
    config.pipeline_model_parallel_size = 2
    with pytest.raises(ConfigError, match=r"-size 2: every decoder layer needs the encoder's"):
        check_t5_supported(config)


def mlp(config):
    return T5MLP.as_mlp_submodule(
        MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        config=config,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        is_mtp_layer=False,
    )


def test_a_dense_layer_drops_hidden_elements_in_training_only():
    run_ranks(_check_mlp_dropout, 1)


def _check_mlp_dropout(rank):
    with model_parallel():
        layer = mlp(t5_config([0], hidden_dropout=0.25))
        layer.linear_fc1.weight.data.fill_(0.0625)  # every hidden element is 1.25
        seen = []
        layer.linear_fc2.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        x_SBD = torch.ones(50, 4, layer.config.hidden_size)
        layer(x_SBD)
        layer.eval()(x_SBD)
    shares = Counter(round(value, 4) for value in seen[0].flatten().tolist())
    assert set(shares) == {0.0, round(1.25 / 0.75, 4)}
    assert shares[0.0] / seen[0].numel() == pytest.approx(0.25, abs=0.02)
    assert set(seen[1].flatten().tolist()) == {1.25}


def test_tensor_ranks_drop_different_columns():
    run_ranks(_check_columns, 2)


def _check_columns(rank):
    with model_parallel(tensor_model_parallel_size=2):
        layer = mlp(t5_config([0], hidden_dropout=0.5, tensor_model_parallel_size=2))
        layer.linear_fc1.weight.data.fill_(0.05)
        seen = []
        layer.linear_fc2.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        layer(torch.ones(8, 1, layer.config.hidden_size))
        masks = [torch.empty_like(seen[0]) for _ in range(2)]
        torch.distributed.all_gather(masks, seen[0].contiguous())
    assert not torch.equal(*masks)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_final_norm_drops_the_same_where_ranks_hold_the_same_tokens(sequence_parallel):
    run_ranks(_check_final_norm, 2, sequence_parallel)


def _check_final_norm(rank, sequence_parallel):
    with model_parallel(tensor_model_parallel_size=2):
        config = t5_config(
            [0],
            hidden_dropout=0.5,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
        )
        norm = FinalNorm(config, config.hidden_size, eps=1e-6)
        x_SBD = torch.ones(8, 1, config.hidden_size)
        dropped = norm(x_SBD).detach()
        both = [torch.empty_like(dropped) for _ in range(2)]
        torch.distributed.all_gather(both, dropped)
        assert set(dropped.flatten().round().tolist()) == {0.0, 2.0}
        assert torch.equal(*both) != sequence_parallel
        torch.testing.assert_close(norm.eval()(x_SBD), x_SBD, rtol=0, atol=1e-5)
