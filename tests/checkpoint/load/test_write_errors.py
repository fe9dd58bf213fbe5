"""A checkpoint that could not be written says how many bytes it needs, and what is whole."""

import shutil
from collections import namedtuple

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_switch.checkpoint.load import write_errors as module
from megatron_switch.checkpoint.load.files import FoundCheckpoint
from megatron_switch.checkpoint.load.write_errors import bytes_to_write, unwritten
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.errors import CheckpointError
from megatron_switch.testing.ranks import run_ranks

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def disk(monkeypatch):
    """Set the bytes that are free on the disk."""
    return lambda free: monkeypatch.setattr(
        shutil, "disk_usage", lambda _: Usage(10**12, 10**12 - free, free)
    )


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "iter_0000020"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"x" * 2**21)
    return folder


def test_a_full_disk_is_named_with_what_is_needed_and_what_was_free(disk, folder):
    disk(4096)
    text = str(unwritten(folder, 3 * 10**9, "Worker failure"))
    assert f"The checkpoint {folder} could not be written: it needs over 2.79 GiB, and" in text
    assert "and there was room for 2.00 MiB." in text  # what was free and what is written already
    assert "save elsewhere with --save" in text
    assert "There is no earlier checkpoint." in text


def test_a_disk_that_is_full_by_what_surrounds_tensors_is_full(disk, folder):
    disk(0)
    text = str(unwritten(folder, 2 * 10**6, "Worker failure"))
    assert "it needs over 1.91 MiB, and there was room for 2.00 MiB." in text
    assert "quota" not in text


def test_where_there_is_room_the_reason_is_told(disk, folder):
    disk(10**11)
    text = str(unwritten(folder, 3 * 10**9, "Worker failure"))
    assert "the disk had room for 93.13 GiB; a quota, a limit on the size of files" in text
    assert "stands in the way: Worker failure." in text


def test_the_newest_whole_checkpoint_is_named(disk, folder, monkeypatch):
    disk(0)
    whole = FoundCheckpoint(folder.parent / "iter_0000010", 10)
    monkeypatch.setattr(module, "find_checkpoint", lambda where: whole)
    error = unwritten(folder, 1, "Worker failure")
    assert isinstance(error, CheckpointError)
    assert str(error).endswith("iter_0000010 is complete: the run continues from it.")


def test_every_tensor_counts_once_over_all_ranks():
    run_ranks(_check_bytes, 2)


def _check_bytes(rank):
    def sharded(key, tensor, replica_id):
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=replica_id)

    state = {
        "cut": ShardedTensor.from_rank_offsets("cut", torch.zeros(3, 4), (0, rank, 2)),
        "same": [sharded("same", torch.zeros(5, dtype=torch.bfloat16), (0, 0, rank))],
        "number": 7,
    }
    with cuda_on_cpu():
        assert bytes_to_write(state) == 2 * 3 * 4 * 4 + 5 * 2
