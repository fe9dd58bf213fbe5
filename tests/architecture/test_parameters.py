"""Closed forms of parameter counts, equal to those of real models to the last number."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from megatron_switch import parallel_state
from megatron_switch.architecture.parameters import (
    GPTShape,
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
    "num_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,
    "padded_vocab_size": 64,
    "num_experts": 8,
    "sparse_layers": (2, 4),
}
SHAPES = {
    "plain": {},
    "dense": {"num_experts": 0, "sparse_layers": ()},
    "untied": {"tied_head": False},
    "learned positions": {"learned_positions": 16},
    "gated": {"gated": True},
    "biases": {"linear_bias": True},
    "bias of queries, keys and values": {"qkv_bias": True},
    "grouped queries": {"num_query_groups": 2},
    "wide heads": {"kv_channels": 10},
    "RMSNorm": {"norm": "RMSNorm"},
    "normalised queries and keys": {"qk_norm": True},
    "narrow experts, in the first layer": {"moe_ffn_hidden_size": 16, "sparse_layers": (1,)},
}
ALL_AT_ONCE = {
    "tied_head": False,
    "learned_positions": 16,
    "gated": True,
    "linear_bias": True,
    "num_query_groups": 2,
    "kv_channels": 10,
    "qk_norm": True,
    "moe_ffn_hidden_size": 16,
}


def model_of(shape, layout, vp_stage=None):
    """Build the real model, or the chunk of it that stands on this rank."""
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        ffn_hidden_size=shape.ffn_hidden_size,
        moe_ffn_hidden_size=shape.moe_ffn_hidden_size,
        num_moe_experts=shape.num_experts or None,
        moe_layer_freq=[int(n in shape.sparse_layers) for n in range(1, shape.num_layers + 1)],
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        gated_linear_unit=shape.gated,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=shape.linear_bias,
        add_qkv_bias=shape.qkv_bias,
        normalization=shape.norm,
        qk_layernorm=shape.qk_norm,
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
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.learned_positions or 16,
        pre_process=stage == 0 and not vp_stage,
        post_process=stage == layout.pp - 1 and vp_stage in (None, layout.vp - 1),
        share_embeddings_and_output_weights=shape.tied_head,
        position_embedding_type="learned_absolute" if shape.learned_positions else "rope",
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
        for name, changes in SHAPES.items():
            shape = GPTShape(**{**PLAIN, **changes})
            expected = counted([model_of(shape, layout)])
            assert total_parameters(shape) == expected, name
            assert total_parameters(shape).total == expected.dense + expected.expert
            # A model with one expert in each sparse layer has what a token meets, but for the
            # routers, which shrink with the experts.
            single = GPTShape(**{**PLAIN, **changes, "num_experts": min(shape.num_experts, 1)})
            routers = len(shape.sparse_layers) * (shape.num_experts - 1) * shape.hidden_size
            met = counted([model_of(single, layout)]).total
            assert active_parameters(shape) == met + (routers if shape.sparse_layers else 0), name


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
            changes = {**ALL_AT_ONCE, "linear_bias": layout.etp == 1}
            for shape in (GPTShape(**PLAIN), GPTShape(**{**PLAIN, **changes})):
                chunks = range(layout.vp) if layout.vp > 1 else [None]
                models = [model_of(shape, layout, chunk) for chunk in chunks]
                stage = layout.coordinates(rank).pp
                assert stage_parameters(shape, layout, stage) == counted(models)
            parallel_state.destroy_model_parallel()


def test_stages_hold_the_whole_model_and_the_second_copy_of_a_tied_head():
    shape = GPTShape(**PLAIN)
    layout = Layout(4, pp=4)
    stages = [stage_parameters(shape, layout, stage).total for stage in range(4)]
    assert sum(stages) == total_parameters(shape).total + 64 * 24


def test_virtual_stages_deal_layers_out_in_chunks():
    assert even_stages(8, Layout(2, pp=2)) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert even_stages(8, Layout(2, pp=2, vp=2)) == [[1, 2, 5, 6], [3, 4, 7, 8]]


def test_uneven_stages_are_counted_as_placed():
    shape = GPTShape(**PLAIN)
    layout = Layout(2, pp=2)
    first, last = (
        stage_parameters(shape, layout, stage, layers_of_stages=[[1, 2, 4], [3]])
        for stage in (0, 1)
    )
    assert (first.expert, last.expert) == (total_parameters(shape).expert, 0)


def test_a_large_model_counted_by_hand():
    width, hidden, vocabulary = 8192, 32768, 50304
    shape = GPTShape(
        num_layers=48,
        hidden_size=width,
        num_attention_heads=64,
        ffn_hidden_size=hidden,
        padded_vocab_size=vocabulary,
        num_experts=128,
        sparse_layers=tuple(range(2, 49, 2)),
    )
    one_mlp = 2 * width * hidden
    attention, norms = 48 * 4 * width**2, (2 * 48 + 1) * 2 * width
    routers = 24 * 128 * width
    dense = attention + norms + routers + 24 * one_mlp + vocabulary * width
    assert total_parameters(shape) == ParameterCount(dense, 24 * 128 * one_mlp)
    assert active_parameters(shape) == dense + 24 * one_mlp
    # 12 layers on a stage, half of them sparse, and one expert on each of 128 ranks.
    stage = stage_parameters(shape, Layout(1024, tp=4, pp=4, ep=128, etp=1), 1)
    assert stage.expert == 6 * one_mlp
    assert stage.dense == 12 * width**2 + 24 * 2 * width + 6 * 128 * width + 6 * one_mlp // 4


def test_layers_that_do_not_spread_evenly_are_refused():
    with pytest.raises(LayoutError, match=r"4 layers .* over 2 stages x 3 chunks = 6"):
        stage_parameters(GPTShape(**PLAIN), Layout(2, pp=2, vp=3), 0)


@pytest.mark.parametrize("placement", [[[1, 2], [3]], [[1, 2, 3], [3, 4]], [[1, 2, 3, 4]]])
def test_a_placement_that_loses_or_repeats_layers_is_refused(placement):
    with pytest.raises(LayoutError, match=r"one of 4 layers stands on one of 2 stages, but the"):
        stage_parameters(GPTShape(**PLAIN), Layout(2, pp=2), 0, layers_of_stages=placement)
