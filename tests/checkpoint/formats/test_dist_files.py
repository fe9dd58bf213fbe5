"""What is written without a model is what Megatron writes, and damage is found where it is."""

import pickle
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_switch.checkpoint.formats.dist_metadata import (
    find_defect,
    read_common_state,
    read_index,
)
from megatron_switch.checkpoint.formats.dist_reader import DistSource, LayeredSource
from megatron_switch.checkpoint.formats.dist_writer import (
    EMPTY_EXTRA_STATE,
    TensorChunk,
    write_dist_checkpoint,
)
from megatron_switch.checkpoint.formats.tensor_source import Region
from megatron_switch.errors import CheckpointError
from megatron_switch.testing.checkpoints import load_tensors, save_checkpoint

WHOLE = torch.arange(48.0).reshape(4, 3, 4)
HALF = torch.arange(6, dtype=torch.bfloat16)


def chunks_of(tensor, key, regions, rank=0):
    return [
        TensorChunk(
            key, tuple(tensor.shape), tensor.dtype, region, lambda b=region: cut(tensor, b), rank
        )
        for region in regions
    ]


def cut(tensor, region):
    return tensor[region.slices_in(Region.whole(tensor.shape))]


QUARTERS = [Region((row, 0, column), (2, 3, 2)) for row in (0, 2) for column in (0, 2)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkpoint with a tensor in four pieces, one in one piece, and an object."""
    chunks = chunks_of(WHOLE, "whole", QUARTERS) + chunks_of(HALF, "half", [Region.whole((6,))], 1)
    write_dist_checkpoint(tmp_path, chunks, {"a/shard_0_1": EMPTY_EXTRA_STATE}, {"iteration": 7})
    return tmp_path


def test_torch_reads_what_was_written(folder):
    assert find_defect(folder) is None
    tensors = load_tensors(folder)
    assert torch.equal(tensors["whole"], WHOLE)
    assert torch.equal(tensors["half"], HALF)
    assert read_common_state(folder) == {"iteration": 7}
    assert sorted(path.name for path in folder.glob("*.distcp")) == [
        "__0_0.distcp",
        "__0_objects.distcp",
        "__1_0.distcp",
    ]


def test_what_torch_wrote_is_read(tmp_path):
    folder = save_checkpoint(tmp_path, 1, {"whole": WHOLE, "half": HALF}, {})
    source = DistSource(folder)
    assert source.tensors["half"].dtype == torch.bfloat16
    assert torch.equal(source.read("whole"), WHOLE)


@pytest.mark.parametrize(
    "region",
    [
        Region((0, 0, 0), (4, 3, 4)),
        Region((1, 1, 1), (2, 1, 2)),  # a piece of each chunk
        Region((2, 0, 2), (2, 3, 2)),  # a whole chunk
        Region((3, 2, 3), (1, 1, 1)),
    ],
)
def test_any_box_is_read(folder, region):
    part = DistSource(folder).read("whole", region)
    assert torch.equal(part, cut(WHOLE, region))
    assert part.untyped_storage().nbytes() == part.nbytes


def test_only_chunks_that_a_box_touches_are_read(folder, monkeypatch):
    source, read = DistSource(folder), []
    original = DistSource._read_chunk
    monkeypatch.setattr(
        DistSource, "_read_chunk", lambda s, k, c: read.append(c) or original(s, k, c)
    )
    source.read("whole", Region((3, 0, 3), (1, 3, 1)))
    assert read == [QUARTERS[3]]


def test_chunks_must_tile_their_tensor(tmp_path):
    with pytest.raises(AssertionError, match="whole is not written whole"):
        write_dist_checkpoint(tmp_path, chunks_of(WHOLE, "whole", QUARTERS[:3]), {}, {})
    with pytest.raises(AssertionError, match="whole is written twice"):
        write_dist_checkpoint(tmp_path, chunks_of(WHOLE, "whole", [*QUARTERS, QUARTERS[0]]), {}, {})


def test_a_failure_ends_the_other_workers_with_the_chunk_at_hand(tmp_path):
    """Or Ctrl-C would wait for files of gigabytes."""
    rows = 40
    made = []
    failed = threading.Event()

    def make(row):
        if row == rows // 2:  # the first of the second file
            failed.set()
            raise CheckpointError("a source is damaged")
        assert failed.wait(10)
        time.sleep(0.05)  # as long as the news needs
        made.append(row)
        return torch.ones(1, 4)

    regions = [Region((row, 0), (1, 4)) for row in range(rows)]
    chunks = [
        TensorChunk("all", (rows, 4), torch.float32, region, partial(make, row))
        for row, region in enumerate(regions)
    ]
    with pytest.raises(CheckpointError, match="a source is damaged"):
        write_dist_checkpoint(tmp_path, chunks, {}, {}, workers=2)
    assert len(made) < 5
    assert not (tmp_path / ".metadata").exists()


def test_a_file_that_was_cut_off_is_named(folder):
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has \d+ bytes, but the index needs"):
        DistSource(folder)


def test_a_damaged_chunk_is_named_with_its_place(folder):
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[:64] = bytes(64)
    path.write_bytes(bytes(content))
    with pytest.raises(
        CheckpointError, match=r"__0_0.distcp: whole is expected at byte 0 as .* but no"
    ):
        DistSource(folder).read("whole")


def change_index(folder, change):
    index = read_index(folder)
    change(index)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_a_chunk_of_another_shape_is_refused(folder):
    def swap(index):
        places = index.storage_data
        places[MetadataIndex("half", torch.Size([0]))] = places[
            MetadataIndex("whole", torch.Size([0, 0, 0]))
        ]

    change_index(folder, swap)
    with pytest.raises(
        CheckpointError, match=r"half is \(2, 3, 2\) torch.float32 at .* says \(6,\) torch.bfloat16"
    ):
        DistSource(folder).read("half")


def test_a_hole_is_refused(folder):
    change_index(folder, lambda index: index.state_dict_metadata["whole"].chunks.pop())
    with pytest.raises(CheckpointError, match=r"chunks of whole hold 36 elements .* needs 48"):
        DistSource(folder).read("whole")


def test_an_entry_without_a_file_is_refused(folder):
    change_index(
        folder, lambda index: index.storage_data.pop(MetadataIndex("half", torch.Size([0])))
    )
    with pytest.raises(CheckpointError, match="names no file for half"):
        DistSource(folder).read("half")


def test_stacked_layers_have_a_key_each(tmp_path):
    tensors = {"decoder.layers.mlp.weight": WHOLE, "decoder.norm.weight": HALF}
    source = LayeredSource(DistSource(save_checkpoint(tmp_path, 1, tensors, {})), {"decoder": 4})
    assert source.tensors["decoder.layers.3.mlp.weight"].shape == (3, 4)
    assert torch.equal(source.read("decoder.layers.3.mlp.weight"), WHOLE[3])
    assert torch.equal(
        source.read("decoder.layers.2.mlp.weight", Region((1, 0), (2, 3))), WHOLE[2, 1:3, :3]
    )
    assert torch.equal(source.read("decoder.norm.weight"), HALF)


def test_a_stack_of_another_depth_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path, 1, {"decoder.layers.mlp.weight": WHOLE}, {})
    with pytest.raises(CheckpointError, match=r"has shape \(4, 3, 4\), but .* describe 6 layers"):
        LayeredSource(DistSource(folder), {"decoder": 6})
