"""A checkpoint rewritten for another layout is the same checkpoint, moments included."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state
from megatron_switch.checkpoint.formats.dist_reader import DistSource
from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.checkpoint.reshard.resharding import (
    compare_copies,
    plan_resharding,
    read_state,
    write_resharding,
)
from megatron_switch.errors import CheckpointError
from megatron_switch.layout.grid import Layout
from megatron_switch.testing.checkpoints import compare_checkpoints, save_checkpoint

OLD = Namespace(
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    expert_model_parallel_size=1,
    expert_tensor_parallel_size=1,
    world_size=1,
    data_parallel_size=1,
    num_layers=2,
    swiglu=True,
)
NEW = Layout(world_size=8, tp=2, cp=1, pp=2, ep=2, etp=2)
FC1 = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
TENSORS = {
    "embedding.word_embeddings.weight": torch.randn(8, 4),
    "decoder.layers.0.mlp.linear_fc1.weight": torch.randn(16, 4),
    FC1: torch.randn(4, 16, 4),
    f"optimizer.state.exp_avg.{FC1}": torch.randn(4, 16, 4).bfloat16(),
    f"optimizer.state.exp_avg_sq.{FC1}": torch.full((4, 16, 4), float("nan")),
}
STATE = {
    "args": OLD,
    "iteration": 5,
    "optimizer": {"param_groups": [{"step": 5}]},
    "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    "rerun_state_machine": {"mode": "off"},
}


def saved(folder: Path, **changes):
    save_checkpoint(folder, 5, TENSORS, {**STATE, **changes})
    return find_checkpoint(folder)


def resharded(found, target: Path, layout: Layout = NEW):
    plan = plan_resharding(found, layout, read_state(found))
    write_resharding(plan, target)
    return plan, find_checkpoint(target)


def test_every_tensor_is_equal_and_cut_for_the_new_layout(tmp_path):
    found = saved(tmp_path / "old")
    _, new = resharded(found, tmp_path / "new")
    assert [d.key for d in compare_checkpoints(found.folder, new.folder)] == [
        f"optimizer.state.exp_avg_sq.{FC1}"  # NaN, which the copy's own comparison takes as it is
    ]
    assert new.iteration == 5
    source = DistSource(new.folder)
    assert source.chunks(FC1)[0].sizes == (1, 4, 4)
    assert source.chunks(f"optimizer.state.exp_avg.{FC1}") == source.chunks(FC1)
    ranks = {path.name.split("_")[2] for path in new.folder.glob("__*_[0-9].distcp")}
    assert ranks == {"0", "1", "4", "5", "6", "7"}  # 2 and 3 are replicas of what 0 and 1 hold


def test_arguments_name_the_new_layout_and_random_states_go(tmp_path):
    plan, new = resharded(saved(tmp_path / "old"), tmp_path / "new")
    state = read_common_state(new.folder)
    args = state["args"]
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert (args.expert_model_parallel_size, args.expert_tensor_parallel_size) == (2, 2)
    assert (args.world_size, args.data_parallel_size, args.no_save_rng) == (8, 2, True)
    assert "rerun_state_machine" not in state
    assert state["optimizer"] == STATE["optimizer"]
    assert OLD.tensor_model_parallel_size == 1
    assert plan.notes == ()  # there were no random states


def test_in_the_same_layout_nothing_is_lost(tmp_path):
    same = Layout(world_size=1, tp=1, cp=1, pp=1, ep=1, etp=1)
    _, new = resharded(saved(tmp_path / "old"), tmp_path / "new", same)
    state = read_common_state(new.folder)
    assert state["rerun_state_machine"] == {"mode": "off"}
    assert not hasattr(state["args"], "no_save_rng")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            "dp_reshardable",
            r"dp_reshardable form.*save it with --dist-ckpt-optim-fully-reshardable",
        ),
        ("dp_zero_gather_scatter", r"cannot be moved .* --dist-ckpt-optim-fully-reshardable"),
    ],
)
def test_state_in_the_order_of_buckets_is_refused(tmp_path, form, message):
    found = saved(tmp_path, content_metadata={"distrib_optim_sharding_type": form})
    with pytest.raises(CheckpointError, match=message):
        plan_resharding(found, NEW, read_state(found))


def test_a_checkpoint_without_arguments_is_refused(tmp_path):
    found = saved(tmp_path, args=None)
    with pytest.raises(CheckpointError, match="stores no arguments"):
        read_state(found)


def test_a_disk_that_changes_what_was_written_is_noticed(tmp_path):
    plan, _ = resharded(saved(tmp_path / "old"), tmp_path / "new")
    changed = {**TENSORS, FC1: TENSORS[FC1] + 1.0}
    save_checkpoint(tmp_path / "bad", 5, changed, STATE)
    bad = DistSource(find_checkpoint(tmp_path / "bad").folder)
    with pytest.raises(CheckpointError, match=rf"{FC1} at \(0, 0, 0\) reads back differently"):
        compare_copies(plan, bad, lambda count: None)
