"""Boxes of a layout are those that Megatron's ranks save, and together they tile every tensor."""

import pytest
import torch

from megatron_switch.checkpoint.formats.tensor_source import Region
from megatron_switch.checkpoint.reshard.pipeline_placement import Placement
from megatron_switch.checkpoint.reshard.tensor_slices import TensorSlices
from megatron_switch.layout.grid import Layout

FC1 = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
FC2 = "decoder.layers.1.mlp.experts.experts.linear_fc2.weight"
SHAPES = {
    "embedding.word_embeddings.weight": (16, 8),
    "embedding.position_embeddings.weight": (4, 8),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (8,),
    "decoder.layers.0.self_attention.linear_qkv.weight": (24, 8),
    "decoder.layers.0.self_attention.linear_qkv.bias": (24,),
    "decoder.layers.0.self_attention.linear_proj.weight": (8, 8),
    "decoder.layers.0.self_attention.linear_proj.bias": (8,),
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (8,),
    "decoder.layers.0.mlp.linear_fc1.weight": (32, 8),
    "decoder.layers.0.mlp.linear_fc2.weight": (8, 16),
    "decoder.layers.1.mlp.router.weight": (4, 8),
    FC1: (4, 32, 8),
    FC2: (4, 8, 16),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (16, 8),
}
LAYOUTS = [
    Layout(world_size=1, tp=1, cp=1, pp=1, ep=1, etp=1),
    Layout(world_size=8, tp=2, cp=1, pp=2, ep=2, etp=1),
    Layout(world_size=8, tp=2, cp=1, pp=2, ep=1, etp=2),
    Layout(world_size=16, tp=4, cp=1, pp=1, ep=4, etp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.grids().splitlines()[0])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("prefix", ["", "optimizer.state.exp_avg."])
def test_boxes_tile_every_tensor(layout, gated, prefix):
    slices = TensorSlices(layout, Placement().stages(2, layout.pp), gated)
    for key, shape in SHAPES.items():
        count = torch.zeros(shape, dtype=torch.int64)
        for rank, region in slices.of(prefix + key, shape):
            assert 0 <= rank < layout.world_size
            count[region.slices_in(Region.whole(shape))] += 1
        assert count.eq(1).all(), key


def placed(key, layout, gated=False, shape=None):
    slices = TensorSlices(layout, Placement().stages(2, layout.pp), gated)
    return {
        (rank, region.offsets, region.sizes)
        for rank, region in slices.of(key, shape or SHAPES[key])
    }


def test_experts_lie_with_the_rank_that_has_them():
    layout = Layout(world_size=8, tp=2, cp=1, pp=2, ep=2, etp=2)
    # Second stage: ranks 4 to 7; expert-tensor parallelism varies fastest.
    assert placed(FC2, layout) == {
        (4 + 2 * (expert // 2) + etp, (expert, 0, 8 * etp), (1, 8, 8))
        for expert in range(4)
        for etp in range(2)
    }


def test_halves_of_a_gated_unit_are_cut_on_their_own():
    layout = Layout(world_size=2, tp=2, cp=1, pp=1, ep=1, etp=1)
    assert placed("decoder.layers.0.mlp.linear_fc1.weight", layout, gated=True) == {
        (rank, (8 * (2 * half + rank), 0), (8, 8)) for half in range(2) for rank in range(2)
    }


def test_stages_have_their_layers_and_ends():
    layout = Layout(world_size=2, tp=1, cp=1, pp=2, ep=1, etp=1)
    ranks = {key: {rank for rank, *_ in placed(key, layout)} for key in SHAPES}
    assert ranks["embedding.word_embeddings.weight"] == {0}
    assert ranks["decoder.layers.0.mlp.linear_fc1.weight"] == {0}
    assert ranks[FC1] == ranks["output_layer.weight"] == {1}
    assert ranks["decoder.final_layernorm.weight"] == {1}


def test_stacked_layers_are_cut_one_by_one():
    layout = Layout(world_size=4, tp=2, cp=1, pp=2, ep=1, etp=1)
    key = "decoder.layers.mlp.linear_fc2.weight"
    assert placed(key, layout, shape=(2, 8, 16)) == {
        (2 * layer + tp, (layer, 0, 8 * tp), (1, 8, 8)) for layer in range(2) for tp in range(2)
    }
