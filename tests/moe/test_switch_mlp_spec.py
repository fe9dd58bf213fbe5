"""The spec builds what a transformer layer asks for, with the parts that the settings choose."""

import functools

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from support.layout_case import D, Layout, start_groups
from support.switch_case import Case

from megatron_switch.config import SwitchConfig
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.moe.dispatcher import PackedDispatcher, PaddedDispatcher
from megatron_switch.moe.experts import GroupedExperts
from megatron_switch.moe.router import SwitchRouter
from megatron_switch.moe.switch_mlp import SwitchMLP, switch_mlp_spec
from megatron_switch.testing.ranks import run_ranks


def test_settings_reach_every_part():
    run_ranks(_check_parts, 1)


def _check_parts(rank):
    groups = start_groups(Layout(1))
    for dispatch, kind in (("packed", PackedDispatcher), ("padded", PaddedDispatcher)):
        switch = SwitchConfig(dispatch=dispatch, expert_dropout=0.1, overlap_chunks=2)
        builder = switch_mlp_spec(switch, seed=5)
        assert isinstance(builder, functools.partial)
        layer = builder(config=Case().transformer(Layout(1)), pg_collection=groups, name="mlp")
        assert type(layer) is SwitchMLP
        assert type(layer.router) is SwitchRouter
        assert type(layer.experts) is GroupedExperts
        assert type(layer.token_dispatcher) is kind
        assert layer.router.switch is layer.switch is switch
        assert layer.experts.expert_dropout == 0.1
        assert (layer.token_dispatcher.overlap_chunks, layer.token_dispatcher.send_keys) == (
            2,
            True,
        )
    layers = [builder(config=layer.config, pg_collection=groups) for _ in range(2)]
    for number, layer in enumerate(layers):
        layer.set_layer_number(number + 1)
    first, second = layers
    for name in ("weight1", "weight2"):
        weights = [*getattr(first.experts, name), *getattr(second.experts, name)]
        assert len({tuple(weight.flatten().tolist()) for weight in weights}) == len(weights)
    assert not torch.equal(first.router.weight, second.router.weight)


def test_a_transformer_layer_numbers_its_switch_layer_from_one():
    run_ranks(_check_in_a_layer, 1)


def _check_in_a_layer(rank):
    with cuda_on_cpu():
        start_groups(Layout(1))
        model_parallel_cuda_manual_seed(1)
        config = Case(config={"params_dtype": torch.float32}).transformer(Layout(1))
        parts = get_gpt_layer_local_submodules(num_experts=4)
        parts.mlp = switch_mlp_spec(SwitchConfig(dispatch="packed"), seed=5)
        layer = ModuleSpec(TransformerLayer, submodules=parts)
        built = TransformerLayer(
            config,
            layer.submodules,
            layer_number=1,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        assert built.is_moe_layer
        assert built.mlp.layer_number == built.mlp.router.layer_number == 1
        hidden_SBD = torch.randn(8, 2, D, requires_grad=True)
        output_SBD, _ = built(hidden_SBD)
        output_SBD.sum().backward()
        assert built.mlp.router.weight.grad.any()
