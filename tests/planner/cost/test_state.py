"""Bytes of weights, gradients and optimizer state, against Megatron's own estimate."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training
from megatron_switch.planner.cost.state import state_bytes

SHAPE = Architecture(
    decoder=Stack(8, (1, 3, 5, 7)),
    hidden_size=256,
    num_attention_heads=8,
    ffn_hidden_size=1024,
    padded_vocab_size=2048,
    num_experts=16,
    share_embeddings_and_output_weights=False,
)
TRAINING = Training(seq_length=128, global_batch_size=64)


@pytest.mark.parametrize(
    ("sizes", "sharding"),
    [
        ({"ep": 16}, "distributed"),
        ({"ep": 4, "tp": 2, "etp": 1}, "distributed"),
        ({"ep": 4, "tp": 2, "etp": 2}, "replicated"),
        ({"ep": 4, "pp": 2}, "distributed"),
        ({"ep": 8, "tp": 4, "pp": 2, "etp": 1}, "replicated"),
    ],
)
def test_equals_megatrons_estimate(sizes, sharding):
    layout = Layout(16, **sizes)
    args = SimpleNamespace(
        num_layers=8,
        hidden_size=256,
        num_attention_heads=8,
        kv_channels=32,
        group_query_attention=False,
        ffn_hidden_size=1024,
        moe_ffn_hidden_size=1024,
        num_experts=16,
        moe_layer_freq=[0, 1] * 4,
        moe_router_topk=1,
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        mtp_num_layers=None,
        multi_latent_attention=False,
        swiglu=False,
        normalization="LayerNorm",
        add_bias_linear=False,
        padded_vocab_size=2048,
        untie_embeddings_and_output_weights=True,
        world_size=16,
        data_parallel_size=layout.dp,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        use_distributed_optimizer=sharding == "distributed",
    )
    training = replace(TRAINING, sharding=sharding)
    states = [state_bytes(SHAPE, layout, training, stage=stage) for stage in {0, layout.pp - 1}]
    fullest = max(state.expert.total + state.dense.total for state in states)
    # Megatron gives the first stage the final norm, which is on the last.
    assert fullest == pytest.approx(compute_weight_and_optimizer_memory(args), rel=5e-4)


def test_offload_moves_the_optimizer_to_the_host():
    layout = Layout(8, ep=8)
    here = state_bytes(SHAPE, layout, TRAINING)
    there = state_bytes(SHAPE, layout, replace(TRAINING, offload_optimizer=True))
    moved = here.expert.optimizer + here.dense.optimizer
    assert there.expert.optimizer == there.dense.optimizer == 0
    assert there.host == pytest.approx(moved * 16 / 12, rel=1e-6)  # and a copy of the gradients


def test_fully_sharded_state_is_cut_over_all_ranks_and_gathered_by_layers():
    layout = Layout(8, ep=2)
    whole = state_bytes(SHAPE, layout, replace(TRAINING, sharding="replicated"))
    cut = state_bytes(SHAPE, layout, replace(TRAINING, sharding="fully_sharded"))
    assert cut.expert.total == pytest.approx(whole.expert.total / 4, rel=1e-6)
    assert cut.dense.total == pytest.approx(whole.dense.total / 8, rel=1e-6)
    # Such a small model is gathered as a whole; gradients of one lot of layers wait.
    ends = 2 * SHAPE.padded_vocab_size * SHAPE.hidden_size
    weights, experts = whole.expert.weights + whole.dense.weights, whole.expert.gradients
    assert len(cut.gathered) == 5  # four sparse layers, and the end
    assert cut.gathered[0] == pytest.approx(weights + experts / 4, rel=1e-3)
    lot = (whole.expert.weights + whole.dense.weights - 2 * ends) / 4
    assert cut.gathered[-1] == pytest.approx(ends * (2 + 4) + 2 * lot, rel=1e-3)
    assert whole.gathered == ()


def test_no_matrix_of_an_expert_is_cut_unless_it_is_transformer_engines():
    layout = Layout(64, ep=16)  # one expert a rank, and four copies of its two matrices
    sharded = replace(TRAINING, sharding="fully_sharded")
    whole = state_bytes(SHAPE, layout, replace(TRAINING, sharding="replicated"))
    stacked = state_bytes(SHAPE, layout, sharded)
    single = state_bytes(SHAPE, layout, replace(sharded, transformer_engine=True))
    assert stacked.expert.total == pytest.approx(whole.expert.total / 2, rel=1e-6)
    assert single.expert.total == pytest.approx(whole.expert.total / 4, rel=1e-6)


def test_fp32_has_no_master():
    layout = Layout(1)
    half = state_bytes(SHAPE, layout, replace(TRAINING, sharding="replicated"))
    full = state_bytes(SHAPE, layout, replace(TRAINING, sharding="replicated", precision="fp32"))
    assert full.expert.total * 18 == half.expert.total * 16


def test_torchs_adam_needs_work_space_and_a_fused_one_none():
    layout = Layout(8, ep=8)
    on_gpu = state_bytes(SHAPE, layout, TRAINING)
    owned = on_gpu.expert.optimizer // 12 + on_gpu.dense.optimizer // 12
    assert on_gpu.step == pytest.approx(4 * owned, rel=1e-6)
    assert state_bytes(SHAPE, layout, replace(TRAINING, transformer_engine=True)).step == 0
