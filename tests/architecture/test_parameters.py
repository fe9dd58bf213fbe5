"""Closed forms of parameter counts, equal to those of real models to the last number."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from megatron_switch import parallel_state
from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import (
    ParameterCount,
    active_parameters,
    even_stages,
    stage_parameters,
    total_parameters,
)
from megatron_switch.config import SwitchConfig
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.models.gpt import switch_gpt_layer_spec
from megatron_switch.moe.switch_mlp import switch_mlp_spec
from megatron_switch.testing.ranks import run_ranks

PLAIN = {
    "decoder": Stack(4, (1, 3)),
    "hidden_size": 24,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "padded_vocab_size": 64,
    "num_experts": 8,
}
LEARNED = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 16}
MODELS = {
    "plain": {},
    "dense": {"num_experts": 0, "decoder": Stack(4)},
    "untied": {"share_embeddings_and_output_weights": False},
    "learned positions": LEARNED,
    "gated": {"gated_linear_unit": True},
    "biases": {"add_bias_linear": True},
    "bias of queries, keys and values": {"add_qkv_bias": True},
    "grouped queries": {"num_query_groups": 2},
    "wide heads": {"kv_channels": 10},
    "RMSNorm": {"normalization": "RMSNorm"},
    "normalised queries and keys": {"qk_layernorm": True},
    "narrow experts, in the first layer": {"moe_ffn_hidden_size": 16, "decoder": Stack(4, (0,))},
}
ALL_AT_ONCE = {
    **LEARNED,
    "share_embeddings_and_output_weights": False,
    "gated_linear_unit": True,
    "add_bias_linear": True,
    "num_query_groups": 2,
    "kv_channels": 10,
    "qk_layernorm": True,
    "moe_ffn_hidden_size": 16,
}


def model_of(described, layout, vp_stage=None):
    """Build the real model, or the chunk of it that stands on this rank."""
    config = TransformerConfig(
        num_layers=described.decoder.num_layers,
        hidden_size=described.hidden_size,
        num_attention_heads=described.num_attention_heads,
        num_query_groups=described.num_query_groups,
        kv_channels=described.kv_channels,
        ffn_hidden_size=described.ffn_hidden_size,
        moe_ffn_hidden_size=described.moe_ffn_hidden_size,
        num_moe_experts=described.num_experts or None,
        moe_layer_freq=described.decoder.layer_freq,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        gated_linear_unit=described.gated_linear_unit,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=described.add_bias_linear,
        add_qkv_bias=described.add_qkv_bias,
        normalization=described.normalization,
        qk_layernorm=described.qk_layernorm,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        pipeline_dtype=torch.float32,
        transformer_impl="local",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
    )
    spec = switch_gpt_layer_spec(
        SimpleNamespace(transformer=config),
        switch_mlp_spec=switch_mlp_spec(SwitchConfig(dispatch="packed"), seed=1),
        vp_stage=vp_stage,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return GPTModel(
        config,
        spec,
        vocab_size=described.padded_vocab_size,
        max_sequence_length=described.learned_positions or 16,
        pre_process=stage == 0 and not vp_stage,
        post_process=stage == layout.pp - 1 and vp_stage in (None, layout.vp - 1),
        share_embeddings_and_output_weights=described.share_embeddings_and_output_weights,
        position_embedding_type=described.position_embedding_type,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        vp_stage=vp_stage,
    )


def counted(models):
    """Return what torch counts; experts are the parameters that Megatron reduces apart."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    expert = sum(p.numel() for p in parameters if not getattr(p, "allreduce", True))
    return ParameterCount(sum(p.numel() for p in parameters) - expert, expert)


@pytest.mark.slow
def test_one_rank_holds_what_torch_counts():
    run_ranks(_check_whole_models, 1)


def _check_whole_models(rank):
    with cuda_on_cpu():
        layout = parallel_state.initialize_model_parallel()
        for name, changes in MODELS.items():
            model = Architecture(**{**PLAIN, **changes})
            expected = counted([model_of(model, layout)])
            assert total_parameters(model) == expected, name
            assert total_parameters(model).total == expected.dense + expected.expert
            # A model with one expert in each sparse layer has what a token meets, but for the
            # routers, which shrink with the experts.
            single = Architecture(**{**PLAIN, **changes, "num_experts": min(model.num_experts, 1)})
            routers = len(model.decoder.sparse_layers) * (model.num_experts - 1) * model.hidden_size
            met = counted([model_of(single, layout)]).total
            assert active_parameters(model) == met + (
                routers if model.decoder.sparse_layers else 0
            ), name


@pytest.mark.slow
def test_every_rank_holds_what_torch_counts():
    run_ranks(_check_ranks, 4)


def _check_ranks(rank):
    with cuda_on_cpu():
        for layout in (
            Layout(4, tp=2, ep=2),
            Layout(4, tp=2, ep=2, etp=1),
            Layout(4, pp=2, ep=2, vp=2),
        ):
            parallel_state.initialize_model_parallel(
                layout.tp,
                layout.pp,
                layout.ep,
                layout.etp,
                virtual_pipeline_model_parallel_size=layout.vp,
            )
            # Megatron refuses biases where experts are cut over ranks.
            changes = {**ALL_AT_ONCE, "add_bias_linear": layout.etp == 1}
            for model in (Architecture(**PLAIN), Architecture(**{**PLAIN, **changes})):
                chunks = range(layout.vp) if layout.vp > 1 else [None]
                models = [model_of(model, layout, chunk) for chunk in chunks]
                stage = layout.coordinates(rank).pp
                assert stage_parameters(model, layout, stage) == counted(models)
            parallel_state.destroy_model_parallel()


def test_stages_hold_the_whole_model_and_the_second_copy_of_a_tied_head():
    model = Architecture(**PLAIN)
    layout = Layout(4, pp=4)
    stages = [stage_parameters(model, layout, stage).total for stage in range(4)]
    assert sum(stages) == total_parameters(model).total + 64 * 24


def test_virtual_stages_deal_layers_out_in_chunks():
    assert even_stages(8, Layout(2, pp=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert even_stages(8, Layout(2, pp=2, vp=2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_uneven_stages_are_counted_as_placed():
    model = Architecture(**PLAIN)
    layout = Layout(2, pp=2)
    first, last = (
        stage_parameters(model, layout, stage, layers_of_stages=[[0, 1, 3], [2]])
        for stage in (0, 1)
    )
    assert (first.expert, last.expert) == (total_parameters(model).expert, 0)


def test_a_large_model_counted_by_hand():
    width, hidden, vocabulary = 8192, 32768, 50304
    model = Architecture(
        decoder=Stack.switch(48),
        hidden_size=width,
        num_attention_heads=64,
        ffn_hidden_size=hidden,
        padded_vocab_size=vocabulary,
        num_experts=128,
    )
    one_mlp = 2 * width * hidden
    attention, norms = 48 * 4 * width**2, (2 * 48 + 1) * 2 * width
    routers = 24 * 128 * width
    dense = attention + norms + routers + 24 * one_mlp + vocabulary * width
    assert total_parameters(model) == ParameterCount(dense, 24 * 128 * one_mlp)
    assert active_parameters(model) == dense + 24 * one_mlp
    # 12 layers on a stage, half of them sparse, and one expert on each of 128 ranks.
    stage = stage_parameters(model, Layout(1024, tp=4, pp=4, ep=128, etp=1), 1)
    assert stage.expert == 6 * one_mlp
    assert stage.dense == 12 * width**2 + 24 * 2 * width + 6 * 128 * width + 6 * one_mlp // 4


def test_layers_that_do_not_spread_evenly_are_refused():
    with pytest.raises(LayoutError, match=r"4 layers .* over 2 stages x 3 chunks = 6"):
        stage_parameters(Architecture(**PLAIN), Layout(2, pp=2, vp=3), 0)


@pytest.mark.parametrize("placement", [[[0, 1], [2]], [[0, 1, 2], [2, 3]], [[0, 1, 2, 3]]])
def test_a_placement_that_loses_or_repeats_layers_is_refused(placement):
    with pytest.raises(LayoutError, match=r"one of 4 layers stands on one of 2 stages, but the"):
        stage_parameters(Architecture(**PLAIN), Layout(2, pp=2), 0, layers_of_stages=placement)
