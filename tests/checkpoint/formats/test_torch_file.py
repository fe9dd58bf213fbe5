"""Files of torch are read bit for bit or refused, and nothing in them is executed."""

import os
import pickle

import pytest
import torch

from megatron_switch.checkpoint.formats.hf_folder import HuggingFaceSource
from megatron_switch.checkpoint.formats.tensor_source import Region
from megatron_switch.errors import CheckpointError

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4)


@pytest.mark.parametrize("zipped", [True, False])
def test_weights_that_torch_saved_are_read(tmp_path, zipped):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": A, "b": B}, path, _use_new_zipfile_serialization=zipped)
    source = HuggingFaceSource(tmp_path)
    assert torch.equal(source.read("a"), A)
    assert torch.equal(source.read("a", Region((1, 0), (1, 2))), A[1:, :2])


class _Trap:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("save", [torch.save, lambda v, p: p.write_bytes(pickle.dumps(v))])
def test_code_in_weights_is_refused_and_not_run(tmp_path, save):
    save({"a": _Trap(tmp_path / "executed")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="Nothing in it was executed") as error:
        HuggingFaceSource(tmp_path)
    assert not (tmp_path / "executed").exists()
    assert "weights_only" not in str(error.value)  # torch's advice is to execute it


def test_a_file_of_torch_that_is_damaged_is_named(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"read as plain tensors \(EOFError\)\. "):
        HuggingFaceSource(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        {"a": {"b": B}},
        {1: B},
        [B],
        {"a": torch.eye(2).to_sparse()},
        {"a": torch.ones(2, device="meta")},
    ],
)
def test_other_things_than_dense_tensors_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="expected to hold dense tensors by name"):
        HuggingFaceSource(tmp_path)


@pytest.mark.parametrize("has_sums", [True, False])
def test_a_flipped_bit_is_found_by_the_files_own_checksum(tmp_path, has_sums):
    path = tmp_path / "pytorch_model.bin"
    torch.serialization.set_crc32_options(has_sums)
    try:
        torch.save({"a": A, "b": B}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    content = bytearray(path.read_bytes())
    place = content.index(A.numpy().tobytes())
    assert torch.equal(HuggingFaceSource(tmp_path).read("a"), A)
    content[place + 5] ^= 1
    path.write_bytes(content)
    source = HuggingFaceSource(tmp_path)
    if not has_sums:  # no file of others' is refused for what it does not have
        assert not torch.equal(source.read("a"), A)
        return
    with pytest.raises(CheckpointError, match=r"is damaged: its checksum of pytorch_model/data/0"):
        source.read("b")
