"""Our files are the library's files, read and written one tensor at a time."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_switch.checkpoint.formats.safetensors_file import (
    SafetensorsFile,
    TensorGroup,
    write_safetensors,
)
from megatron_switch.checkpoint.formats.tensor_source import Region
from megatron_switch.errors import CheckpointError

TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
    "number": torch.tensor(3.0, dtype=torch.float16),
    "bytes": torch.arange(3, dtype=torch.int8),
}


@pytest.fixture
def path(tmp_path):
    """A file that the library wrote."""
    save_file(TENSORS, tmp_path / "theirs.safetensors")
    return tmp_path / "theirs.safetensors"


def test_we_read_what_the_library_wrote(path):
    file = SafetensorsFile(path)
    assert file.tensors.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert file.tensors[key].dtype == tensor.dtype
        assert torch.equal(file.read(key), tensor)
    assert torch.equal(file.read("matrix", Region((1, 1), (2, 2))), TENSORS["matrix"][1:, 1:3])


def test_the_library_reads_what_we_wrote(tmp_path):
    groups = [
        TensorGroup((key,), (tuple(tensor.shape),), tensor.dtype, lambda t=tensor: (t,))
        for key, tensor in TENSORS.items()
    ]
    both = (TENSORS["matrix"].T, TENSORS["matrix"][1:])  # neither is contiguous storage of its own
    groups.append(TensorGroup(("t", "rest"), ((4, 3), (2, 4)), torch.float32, lambda: both))
    sizes = []
    write_safetensors(tmp_path / "ours.safetensors", groups, sizes.append)
    found = load_file(tmp_path / "ours.safetensors")
    expected = {**TENSORS, "t": both[0], "rest": both[1]}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert sum(sizes) == sum(tensor.nbytes for tensor in expected.values())


def test_a_file_that_was_cut_off_is_refused(path):
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(
        CheckpointError, match=r"theirs.safetensors is no .* cut off: .* Copy it again"
    ):
        SafetensorsFile(path)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(path):
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(CheckpointError, match=r"theirs.safetensors: matrix cannot be read: "):
        file.read("matrix")


def header(entry) -> bytes:
    text = json.dumps({"x": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header too small"),
        (b"\xff" * 32, "header too large"),
        ((6).to_bytes(8, "little") + b"[1, 2]", "x.safetensors is no safetensors file"),
        (header({"dtype": "Q9", "shape": [4], "data_offsets": [0, 16]}), "unknown variant `Q9`"),
        (header({"dtype": "C64", "shape": [2], "data_offsets": [0, 16]}), "x is of the unknown"),
        (
            header({"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}),
            "invalid shape, data type, or offset",
        ),
        (header({"dtype": "F32", "shape": [4]}), "data_offsets"),
        ((90_000).to_bytes(8, "little") + b"[" * 90_000, "invalid JSON in header"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path, content, message):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "places",
    [
        {"a": [0, 8], "b": [4, 12]},
        {"a": [0, 8], "b": [0, 8]},
        {"a": [0, 8], "b": [12, 20]},
        {"a": [4, 12], "b": [12, 20]},
        {"a": [-4, 4], "b": [4, 12]},
        {"a": [0, 8], "b": [8, 16]},
    ],
)
def test_tensors_that_overlap_or_leave_holes_are_refused(tmp_path, places):
    path = tmp_path / "x.safetensors"
    entries = {
        key: {"dtype": "F32", "shape": [2], "data_offsets": place} for key, place in places.items()
    }
    text = json.dumps(entries).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(20))
    with pytest.raises(CheckpointError, match=r"x.safetensors is no .* or damaged"):
        SafetensorsFile(path)


def test_a_file_that_goes_away_while_it_is_read_is_read_to_its_end(path):
    file = SafetensorsFile(path)
    path.unlink()
    assert torch.equal(file.read("matrix"), TENSORS["matrix"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"x.safetensors is missing"):
        SafetensorsFile(tmp_path / "x.safetensors")
