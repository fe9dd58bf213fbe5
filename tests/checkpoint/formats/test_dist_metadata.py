"""An index is read without executing it, and what is incomplete is told apart."""

import json
import os
import pickle
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from megatron_switch.checkpoint.formats.dist_metadata import (
    COMMON_STATE_KEY,
    find_defect,
    foreign_format,
    read_backend,
    read_common_state,
    read_index,
)
from megatron_switch.checkpoint.formats.foreign_formats import LEGACY, PLAIN_TORCH
from megatron_switch.errors import CheckpointError
from megatron_switch.testing.checkpoints import save_checkpoint

TENSORS = {"weight": torch.arange(12.0).reshape(3, 4), "half": torch.ones(5, dtype=torch.bfloat16)}
COMMON = {
    "args": Namespace(num_layers=2, switch_capacity=None, moe_layer_freq=[0, 1]),
    "iteration": 3,
    "opt_param_scheduler": {"max_lr": 1e-3},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, 3, TENSORS, COMMON)


def test_a_complete_checkpoint_has_no_defect(checkpoint):
    assert find_defect(checkpoint) is None
    assert read_backend(checkpoint) == "torch_dist"
    assert read_index(checkpoint).state_dict_metadata["weight"].size == torch.Size([3, 4])


def test_common_state_comes_back_as_it_was_saved(checkpoint):
    assert read_common_state(checkpoint) == COMMON


def test_common_state_in_a_file_of_its_own_is_read_too(tmp_path):
    folder = save_checkpoint(tmp_path, 3, TENSORS, {})
    index = read_index(folder)
    del index.state_dict_metadata[COMMON_STATE_KEY]
    index.storage_data = {
        key: entry for key, entry in index.storage_data.items() if key.fqn != COMMON_STATE_KEY
    }
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    assert find_defect(folder) == f"{folder / 'common.pt'} is missing."
    torch.save(COMMON, folder / "common.pt")
    assert find_defect(folder) is None
    assert read_common_state(folder) == COMMON


class _Trap:
    """Creates a file when it is unpickled by somebody who does not look."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_an_index_is_refused_by_name_and_not_run(checkpoint, tmp_path):
    proof = tmp_path / "executed"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Trap(proof)))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which no index .* needs"):
        read_index(checkpoint)
    assert not proof.exists()
    assert "posix.mkdir" in find_defect(checkpoint)


def test_code_in_the_common_state_is_refused_and_not_run(tmp_path):
    proof = tmp_path / "executed"
    folder = save_checkpoint(tmp_path, 3, TENSORS, {"args": _Trap(proof)})
    with pytest.raises(CheckpointError, match=r"(?s)cannot be read safely: .*posix\.mkdir"):
        read_common_state(folder)
    assert not proof.exists()


def test_an_index_that_points_elsewhere_is_refused(checkpoint):
    index = read_index(checkpoint)
    next(iter(index.storage_data.values())).relative_path = "../../secret"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    assert "'../../secret', outside of its own folder" in find_defect(checkpoint)
    with pytest.raises(CheckpointError, match="outside of its own folder"):
        read_common_state(checkpoint)


def _remove(name):
    return lambda folder: next(folder.glob(name)).unlink()


def _write(name, content):
    return lambda folder: next(folder.glob(name)).write_bytes(content)


def _shorten(folder):
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "defect"),
    [
        (_remove("metadata.json"), "metadata.json is missing; it is written last."),
        (_write("metadata.json", b""), "metadata.json cannot be read"),
        (_write("metadata.json", b"[]"), "metadata.json cannot be read"),
        (_write("metadata.json", b'{"sharded_backend": "zarr"}'), "the format 'zarr'"),
        (_remove(".metadata"), ".metadata is missing."),
        (_write(".metadata", b""), ".metadata is empty."),
        (_write(".metadata", b"\x80\x04nonsense"), ".metadata cannot be read"),
        (_write(".metadata", pickle.dumps({})), "is not the index of a torch_dist checkpoint"),
        (_remove("*.distcp"), ".distcp is missing."),
        (_write("*.distcp", b""), ".distcp has 0 bytes, but the index needs"),
        (_shorten, "bytes, but the index needs"),
    ],
)
def test_what_is_missing_is_named(checkpoint, damage, defect):
    damage(checkpoint)
    assert defect in find_defect(checkpoint)


def test_a_folder_that_is_not_there_is_a_defect(tmp_path):
    assert find_defect(tmp_path / "iter_0000009") == f"{tmp_path / 'iter_0000009'} does not exist."


def test_legacy_checkpoints_are_recognised(tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    assert foreign_format(tmp_path) is LEGACY
    assert "legacy format" in find_defect(tmp_path)


def test_plain_torch_checkpoints_are_recognised(tmp_path):
    state = {"model": {"weight": torch.ones(2)}, "checkpoint_version": 3.0}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert foreign_format(tmp_path) is PLAIN_TORCH


def test_a_half_written_checkpoint_is_not_taken_for_a_foreign_one(checkpoint):
    (checkpoint / "metadata.json").unlink()
    assert foreign_format(checkpoint) is None


def test_every_class_of_an_index_that_keeps_the_plans_is_known(checkpoint):
    """Megatron stores the ranks' save plans in the index, which torch itself does not."""
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
    from torch.distributed.checkpoint.planner import WriteItemType as Type

    index = read_index(checkpoint)
    weight = index.state_dict_metadata["weight"]
    key = next(each for each in index.storage_data if each.fqn == "weight")
    data = TensorWriteData(weight.chunks[0], weight.properties, weight.size)
    index.all_local_plans = [SavePlan([WriteItem(key, Type.SHARD, tensor_data=data)])]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    assert read_index(checkpoint).all_local_plans == index.all_local_plans


def test_the_index_is_the_one_that_torch_reads(checkpoint):
    from torch.distributed.checkpoint import FileSystemReader

    theirs = FileSystemReader(checkpoint).read_metadata()
    ours = read_index(checkpoint)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


def test_the_backend_is_what_the_file_says(tmp_path):
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "fsdp_dtensor"}))
    assert read_backend(tmp_path) == "fsdp_dtensor"


def test_damaged_common_state_is_an_error_not_a_crash(checkpoint):
    path = next(checkpoint.glob("*.distcp"))
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CheckpointError, match="cannot be read safely"):
        read_common_state(checkpoint)
