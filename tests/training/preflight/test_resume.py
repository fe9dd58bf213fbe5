"""What is loaded is decided from the files, before Megatron looks at them."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from megatron_switch.checkpoint.load.files import TRACKER
from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.testing.checkpoints import save_checkpoint
from megatron_switch.training.preflight import resume
from megatron_switch.training.preflight.resume import find_what_to_load, with_checkpoint_args


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch):
    monkeypatch.setattr(resume, "get_tokenizer", lambda: SimpleNamespace(vocab_size=100))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def arguments(folder, **changes):
    values = {
        "load": str(folder),
        "save": None,
        "ckpt_step": None,
        "rank": 0,
        "padded_vocab_size": 1024,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 1,
        "fake_process_group": False,
    }
    return Namespace(**{**values, **changes})


def save(folder, iteration, args=None):
    common = {"iteration": 0 if iteration == "release" else iteration, "checkpoint_version": 3.0}
    if args is not None:
        common["args"] = args
    return save_checkpoint(folder, iteration, {"weight": torch.zeros(2)}, common)


def test_nothing_to_load(folder):
    assert find_what_to_load(arguments(folder, load=None)) == ()


def test_a_checkpoint_without_arguments_is_loaded_and_said(folder):
    save(folder, 3)
    args = arguments(folder)
    (note,) = find_what_to_load(args)
    assert note.startswith("The checkpoint stores no arguments")
    assert args.ckpt_step is None


def test_the_newest_whole_one_is_named_to_megatron(folder):
    save(folder, 3)
    (save(folder, 5) / ".metadata").unlink()
    tracker = folder / TRACKER
    before = tracker.read_text()
    notes = find_what_to_load(arguments(folder, rank=1))
    assert "Continuing from iter_0000003" in notes[0]
    find_what_to_load(arguments(folder, fake_process_group=True))
    assert tracker.read_text() == before  # one rank writes for all, and none in a rehearsal
    find_what_to_load(arguments(folder))
    assert tracker.read_text() == "3"


def test_a_release_is_loaded_as_one(folder):
    save(folder, "release")
    args = arguments(folder)
    find_what_to_load(args)
    assert args.ckpt_step is None


def test_the_rows_of_the_embedding_are_the_checkpoints(folder, monkeypatch):
    save(folder, 3, Namespace(padded_vocab_size=128))
    monkeypatch.setattr(resume, "check_resume", lambda state, args, *, is_release: ("compared",))
    args = arguments(folder)
    assert find_what_to_load(args) == ("compared",)
    assert args.padded_vocab_size == 128
    monkeypatch.setattr(resume, "get_tokenizer", lambda: SimpleNamespace(vocab_size=200))
    with pytest.raises(CheckpointError, match=r"200 tokens, but the checkpoint's .*only 128 rows"):
        find_what_to_load(args)


@pytest.mark.parametrize("exists", [True, False])
def test_a_first_start_may_load_from_where_it_saves(folder, exists):
    if exists:
        folder.mkdir()
    args = arguments(folder, save=str(folder))
    (note,) = find_what_to_load(args)
    assert note == f"{folder} holds no checkpoint yet: training starts from new weights."
    assert args.load is None
    with pytest.raises(CheckpointError):
        find_what_to_load(arguments(folder, save="elsewhere"))


def test_what_is_not_asked_for_is_not_taken(sparse_line):
    line = sparse_line("--load gone")
    assert with_checkpoint_args(line) is line


def test_model_and_routing_come_from_the_checkpoint_unless_given(sparse_line, folder):
    stored = sparse_line("--num-layers 2 --moe-layer-freq [1,1] --switch-recipe hf").args
    save(folder, 3, stored)
    flags = f"--use-checkpoint-args --load {folder} --num-layers 2 --moe-z-loss-coeff 0.5"
    line = with_checkpoint_args(sparse_line(flags))
    assert line.args.moe_layer_freq == [1, 1]
    assert "moe_layer_freq" in line.explicit  # no default replaces it
    assert (line.args.switch_capacity, line.args.switch_capacity_group) == (64, "sequence")
    assert line.args.moe_input_jitter_eps == 1e-2
    assert line.args.moe_z_loss_coeff == 0.5
    assert line.args.load == str(folder)


def test_nowhere_to_take_the_model_from(sparse_line, folder):
    with pytest.raises(ConfigError, match=r"no checkpoint is given\. Add --load"):
        with_checkpoint_args(sparse_line("--use-checkpoint-args"))
    save(folder, 3)
    line = sparse_line(f"--use-checkpoint-args --load {folder}")
    with pytest.raises(CheckpointError, match=r"stores no arguments .*--switch-model"):
        with_checkpoint_args(line)
