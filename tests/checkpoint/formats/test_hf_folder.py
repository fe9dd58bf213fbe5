"""A folder is taken as what its index says, and nothing in it is executed."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_switch.checkpoint.formats.hf_folder import (
    HuggingFaceSource,
    copy_tokenizer,
    read_json,
    write_json,
    write_weights,
)
from megatron_switch.checkpoint.formats.safetensors_file import TensorGroup
from megatron_switch.checkpoint.formats.tensor_source import Region
from megatron_switch.errors import CheckpointError

A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4)


@pytest.fixture
def sharded(tmp_path):
    """Two files and their index."""
    save_file({"a": A}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": B}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": index})
    return tmp_path


def test_several_files_are_one_source(sharded):
    source = HuggingFaceSource(sharded)
    assert torch.equal(source.read("a"), A)
    assert torch.equal(source.read("b", Region((1,), (2,))), B[1:3])


def test_an_absent_file_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2 files, of which 1 are missing: model-00002-of"):
        HuggingFaceSource(sharded)


def test_an_index_of_other_files_is_refused(sharded):
    index = read_json(sharded / "model.safetensors.index.json")["weight_map"]
    path = sharded / "model.safetensors.index.json"
    write_json(path, {"weight_map": {**index, "c": index["a"]}})
    with pytest.raises(CheckpointError, match=r"names tensors that are not in those files: c in"):
        HuggingFaceSource(sharded)
    save_file({"a": A, "d": B}, sharded / index["a"])
    write_json(path, {"weight_map": index})
    with pytest.raises(CheckpointError, match=r"does not name tensors that its files hold: d"):
        HuggingFaceSource(sharded)
    save_file({"a": A, "b": B}, sharded / index["a"])
    with pytest.raises(CheckpointError, match=r"b is both in .*00001.* and in .*00002"):
        HuggingFaceSource(sharded)
    write_json(path, {"weight_map": {"a": "../elsewhere.safetensors"}})
    with pytest.raises(CheckpointError, match="points outside of its folder"):
        HuggingFaceSource(sharded)
    write_json(path, {})
    with pytest.raises(CheckpointError, match="has no weight_map"):
        HuggingFaceSource(sharded)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is no file that can be read"):
        read_json(tmp_path / "config.json")


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights"):
        HuggingFaceSource(tmp_path)
    with pytest.raises(CheckpointError, match=r"is no folder, and nothing is downloaded\. .* hf"):
        HuggingFaceSource(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("adapter_model.safetensors", "merge it into its model first"),
        ("snapshots", "name the one below snapshots"),
        ("model-q4.gguf", "take the model that it was made of"),
        ("consolidated.00.pth", "as Meta publishes them"),
        ("latest_checkpointed_iteration.txt", "It is a Megatron checkpoint"),
    ],
)
def test_what_a_folder_holds_instead_of_weights_is_named(tmp_path, name, hint):
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"holds no weights: .* {hint}"):
        HuggingFaceSource(tmp_path)


def test_files_are_divided_where_they_grow_too_large(tmp_path):
    groups = [
        TensorGroup((name,), ((2, 3),), torch.float32, lambda n=number: (A + n,))
        for number, name in enumerate("abcde")
    ]
    write_weights(tmp_path, groups, shard_bytes=50)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert load_file(tmp_path / names[1]).keys() == {"c", "d"}
    source = HuggingFaceSource(tmp_path)
    assert all(torch.equal(source.read(n), A + i) for i, n in enumerate("abcde"))
    index = read_json(tmp_path / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == 5 * 24


def test_broken_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="expected to hold a JSON object"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json(tmp_path / "config.json")


def test_only_a_tokenizers_files_are_copied(tmp_path):
    (tmp_path / "from").mkdir()
    for name in ("tokenizer.json", "spiece.model", "model.safetensors"):
        (tmp_path / "from" / name).write_text(name)
    assert copy_tokenizer(tmp_path / "from", tmp_path / "to") == ("tokenizer.json", "spiece.model")
    assert not (tmp_path / "to" / "model.safetensors").exists()
