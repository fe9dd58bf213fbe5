"""Rows and layers as the dispatchers and schedules really have them."""

from dataclasses import replace

import pytest
import torch

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.model_flags import model_from_flags, read_model
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Capacity, Slots, Training
from megatron_switch.moe.dispatch_plan import ExpertGrid, padded_plan
from megatron_switch.planner.cost.activations import (
    LayerBytes,
    chunks_under_way,
    kept_by_layers,
    layers_of_stage,
    rows_of_experts,
)

MODEL = Architecture(
    decoder=Stack(8, (1, 3, 5, 7)),
    hidden_size=64,
    num_attention_heads=4,
    ffn_hidden_size=128,
    padded_vocab_size=1024,
    num_experts=8,
)
TRAINING = Training(seq_length=64, micro_batch_size=2, global_batch_size=64)


@pytest.mark.parametrize(
    ("sizes", "group"),
    [
        ({"ep": 8}, "microbatch"),
        ({"ep": 4, "tp": 2, "etp": 1}, "microbatch"),
        ({"ep": 2, "tp": 2, "etp": 2}, "sequence"),
        ({"ep": 8, "tp": 4, "etp": 1}, "sequence"),
    ],
)
def test_padded_rows_are_those_of_the_dispatchers_plan(sizes, group):
    layout = Layout(8, **sizes)
    training = replace(TRAINING, capacity=Capacity(group=group))
    slots = Slots.of(8, layout, training)
    plan = padded_plan(
        torch.full((128,), -1),
        capacity=slots.capacity,
        num_groups=slots.num_groups,
        shard=0,
        num_shards=layout.tp * layout.cp,
        num_chunks=1,
        grid=ExpertGrid(8, layout.ep, layout.etp),
    )
    assert rows_of_experts(MODEL, layout, training) == sum(plan.chunks[0].receive)


def test_packed_rows_are_the_kept_tokens():
    training = replace(TRAINING, dispatch="packed", capacity=Capacity(factor=-1.0))
    assert rows_of_experts(MODEL, Layout(8, ep=8), training) == 128
    cut = Layout(8, ep=2, tp=2, etp=2)
    assert rows_of_experts(MODEL, cut, training) == 64 * 2  # a copy for each part of an expert
    tight = replace(TRAINING, dispatch="packed", capacity=Capacity(factor=0.5, least=0))
    assert rows_of_experts(MODEL, Layout(8, ep=8), tight) <= 64


@pytest.mark.parametrize(
    ("group", "tokens", "groups"), [("microbatch", 128, 1), ("sequence", 64, 2), ("ep", 512, 1)]
)
def test_capacity_groups(group, tokens, groups):
    training = replace(TRAINING, capacity=Capacity(group=group))
    slots = Slots.of(8, Layout(8, ep=8, tp=2, etp=1), training)
    assert (slots.group_tokens, slots.num_groups) == (tokens, groups)
    assert slots.capacity == int(tokens * 1.25 / 8)
    absolute = replace(TRAINING, capacity=Capacity(slots=7, group=group))
    assert Slots.of(8, Layout(8, ep=8), absolute).capacity == 7


def test_interleaving_keeps_more_chunks_and_each_is_smaller():
    training = replace(TRAINING, global_batch_size=2 * 16)
    plain = Layout(4, pp=4)
    cut = Layout(4, pp=4, vp=2)
    assert [chunks_under_way(plain, training, stage) for stage in range(4)] == [4, 3, 2, 1]
    # Megatron's warm-up: two for each later stage, a round for each earlier chunk, and one more.
    assert [chunks_under_way(cut, training, stage) for stage in range(4)] == [11, 9, 7, 5]
    alike = replace(MODEL, decoder=Stack(8, tuple(range(8))))
    whole = kept_by_layers(alike, plain, training).activations
    assert kept_by_layers(alike, cut, training).activations == pytest.approx(whole * 11 / 8)


def test_layers_of_a_stage():
    stage = layers_of_stage(MODEL, 2, 1, 0)
    assert (stage.dense, stage.sparse, stage.total) == (2, 2, 4)
    uneven = replace(MODEL, decoder=Stack(8, (0, 1, 2)))
    assert layers_of_stage(uneven, 2, 1, 0).sparse == 3
    assert layers_of_stage(uneven, 2, 1, 1).sparse == 0


def test_a_dense_layer_with_dropout_is_the_known_34_bytes():
    # Korthikanti et al., arXiv:2205.05198, table 2: 34 bytes a token and width, at F = 4 D; apart
    # from statistics of the softmax (4 bytes a head), which a fused kernel keeps.
    model = replace(MODEL, num_experts=0, decoder=Stack(8), ffn_hidden_size=4 * 64)
    training = replace(TRAINING, hidden_dropout=0.1)
    kept = LayerBytes(model, Layout(8), training).dense
    assert kept == 34 * 128 * 64 + 4 * 128 * 4


def test_what_is_cut_over_tensor_ranks():
    one = LayerBytes(MODEL, Layout(8), TRAINING)
    four = LayerBytes(MODEL, Layout(8, tp=4, ep=4, etp=1), TRAINING)
    assert four.dense * 4 == one.dense
    assert four.stream * 4 == one.stream
    without = LayerBytes(
        MODEL, Layout(8, tp=4, ep=4, etp=1), replace(TRAINING, sequence_parallel=False)
    )
    assert without.dense > four.dense


def test_a_t5_keeps_both_stacks_and_the_attention_between_them():
    model = model_from_flags(read_model("switch-base-128"))
    training = replace(TRAINING, capacity=Capacity())
    kept = kept_by_layers(model, Layout(1), training)
    decoder = replace(model, encoder=None)
    alone = kept_by_layers(decoder, Layout(1), training)
    assert 2 * alone.activations < kept.activations < 3 * alone.activations
    assert kept.routing == 2 * alone.routing


def test_recomputation_keeps_less_and_transformer_engine_more():
    layout = Layout(8, ep=8)
    base = kept_by_layers(MODEL, layout, TRAINING)
    moe = replace(TRAINING, recompute="selective", recompute_modules=("moe",))
    full = replace(TRAINING, recompute="full")
    assert kept_by_layers(MODEL, layout, full).activations < base.activations
    assert kept_by_layers(MODEL, layout, moe).activations < base.activations
    assert kept_by_layers(MODEL, layout, moe).routing == 0
    engine = replace(TRAINING, transformer_engine=True)
    assert kept_by_layers(MODEL, layout, engine).activations > base.activations
