"""Few rows an expert are slow for reading weights; many are as fast as the products themselves."""

from dataclasses import replace

import pytest

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Capacity, Training
from megatron_switch.planner.cost.expert_weights import rows_of_one_expert, seconds_of_weights
from megatron_switch.planner.cost.timing import predict_step, useful_flops
from megatron_switch.planner.hardware.cluster import load_hardware
from megatron_switch.planner.request import PlanRequest
from megatron_switch.planner.search import find_plans

H100 = load_hardware("h100-80gb-ndr")
WIDTH, HIDDEN = 2048, 8192
MODEL = Architecture(
    decoder=Stack.switch(24),
    hidden_size=WIDTH,
    num_attention_heads=16,
    ffn_hidden_size=HIDDEN,
    padded_vocab_size=32000,
    num_experts=64,
    share_embeddings_and_output_weights=False,
    add_bias_linear=False,
)
TRAINING = Training(
    seq_length=2048,
    global_batch_size=512,
    dispatch="packed",
    capacity=Capacity(factor=-1.0),  # all tokens are rows
)


def test_32_rows_an_expert_wait_by_hand():
    layout = Layout(32, pp=8)
    assert rows_of_one_expert(MODEL, layout, TRAINING) == 32
    weights = 64 * 2 * WIDTH * HIDDEN
    product = 2 * weights * 32 / (989e12 * 0.6)
    reading, adding = 2 * weights / 3352e9, 8 * weights / 3352e9
    assert (H100.peak_tflops, H100.gemm_efficiency, H100.hbm_gb_s) == (989, 0.6, 3352)
    expected = 2 * (reading - product) + (adding - product)
    assert seconds_of_weights(MODEL, layout, TRAINING, H100) == pytest.approx(expected)
    assert expected > 5 * product  # so the products run at a tenth of the peak, not at 60 %


def test_many_rows_do_not_wait():
    layout = Layout(32, ep=8)
    several = replace(TRAINING, micro_batch_size=4)
    assert rows_of_one_expert(MODEL, layout, several) == 1024
    assert seconds_of_weights(MODEL, layout, several, H100) == 0.0
    timing = predict_step(MODEL, layout, several, H100)
    assert timing.weights == 0.0


def test_layers_computed_again_read_their_weights_again():
    layout = Layout(32, pp=8)
    once = seconds_of_weights(MODEL, layout, TRAINING, H100)
    again = replace(TRAINING, recompute="selective", recompute_modules=("moe",))
    assert seconds_of_weights(MODEL, layout, again, H100) > once
    assert seconds_of_weights(
        MODEL, layout, replace(TRAINING, recompute="full"), H100
    ) == seconds_of_weights(MODEL, layout, again, H100)


def test_64_experts_on_four_nodes_are_not_put_on_every_rank():
    request = PlanRequest(
        model=MODEL,
        training=Training(seq_length=2048, global_batch_size=512),
        hardware=H100,
        nodes=4,
    )
    best = find_plans(request, count=1).best[0]
    assert best.layout.ep == 8
    assert rows_of_one_expert(MODEL, best.layout, best.training) > 300


@pytest.mark.parametrize("tied", [True, False])
def test_looking_up_an_embedding_is_no_useful_operation(tied):
    vocabulary = 32000 * WIDTH
    model = replace(MODEL, share_embeddings_and_output_weights=tied)
    smaller = replace(model, padded_vocab_size=0)
    added = useful_flops(model, 2048) - useful_flops(smaller, 2048)
    assert added == 6 * vocabulary  # the head's product, once, however many matrices there are


def test_a_table_of_positions_is_no_useful_operation_either():
    learned = replace(
        MODEL, position_embedding_type="learned_absolute", max_position_embeddings=2048
    )
    rotated = replace(learned, position_embedding_type="rope")
    assert useful_flops(learned, 2048) == useful_flops(rotated, 2048)
