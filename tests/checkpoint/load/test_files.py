"""Which checkpoint a run continues from, and what it is told when there is none."""

import json
import re
from pathlib import Path

import pytest
import torch

from megatron_switch.checkpoint.load import files
from megatron_switch.checkpoint.load.files import (
    FoundCheckpoint,
    find_checkpoint,
    has_checkpoint,
    write_tracker,
)
from megatron_switch.errors import CheckpointError
from megatron_switch.testing import checkpoints


def save(folder: Path, *iterations) -> None:
    for iteration in iterations:
        tensors = {"weight": torch.ones(3)}
        checkpoints.save_checkpoint(folder, iteration, tensors, {"iteration": iteration})


def tracker(folder: Path) -> Path:
    return folder / files.TRACKER


def cut(folder: Path, iteration: int) -> None:
    """Leave the iteration as a job does that is killed while saving."""
    (folder / f"iter_{iteration:07d}" / "metadata.json").unlink()


def test_the_named_iteration_is_taken_without_a_word(tmp_path):
    save(tmp_path, 3, 6)
    assert find_checkpoint(tmp_path) == FoundCheckpoint(tmp_path / "iter_0000006", 6)


def test_an_older_iteration_that_the_tracker_names_is_respected(tmp_path):
    save(tmp_path, 3, 6)
    tracker(tmp_path).write_text("3\n")
    assert find_checkpoint(tmp_path) == FoundCheckpoint(tmp_path / "iter_0000003", 3)


def test_a_release_is_iteration_zero(tmp_path):
    save(tmp_path, "release")
    found = find_checkpoint(tmp_path)
    assert found == FoundCheckpoint(tmp_path / "release", 0)
    assert found.is_release


@pytest.mark.parametrize(
    ("content", "trouble"),
    [
        (None, "is missing"),
        ("", "is empty"),
        ("  \n", "is empty"),
        ("12x", r"holds '12x', which is neither an iteration nor 'release'"),
        ("9", r"names iter_0000009, which is not complete: .*iter_0000009 does not exist"),
    ],
)
def test_a_bad_tracker_falls_back_to_the_newest_complete_iteration(tmp_path, content, trouble):
    save(tmp_path, 3, 6)
    tracker(tmp_path).unlink()
    if content is not None:
        tracker(tmp_path).write_text(content)
    found = find_checkpoint(tmp_path)
    assert (found.folder, found.iteration) == (tmp_path / "iter_0000006", 6)
    assert re.search(trouble, found.message)
    assert "Continuing from iter_0000006, the newest complete one." in found.message


def test_an_iteration_cut_off_while_saving_is_passed_over(tmp_path):
    save(tmp_path, 3, 6, 9)
    cut(tmp_path, 9)
    found = find_checkpoint(tmp_path)
    assert found.iteration == 6
    assert "iter_0000009, which is not complete" in found.message
    assert "metadata.json is missing" in found.message


def test_iterations_are_ordered_as_numbers(tmp_path):
    save(tmp_path, 9, 10_000_000)
    tracker(tmp_path).unlink()
    assert find_checkpoint(tmp_path).iteration == 10_000_000


def test_a_release_is_the_last_resort(tmp_path):
    save(tmp_path, "release", 3)
    cut(tmp_path, 3)
    assert find_checkpoint(tmp_path).is_release


def test_a_step_that_the_user_names_is_that_one_or_an_error(tmp_path):
    save(tmp_path, 3, 6, 9)
    cut(tmp_path, 6)
    assert find_checkpoint(tmp_path, iteration=3).iteration == 3
    with pytest.raises(CheckpointError, match=r"--ckpt-step 6 .* not complete: .*metadata\.json"):
        find_checkpoint(tmp_path, iteration=6)
    with pytest.raises(CheckpointError, match=r"--ckpt-step 7 .* iter_0000009, iter_0000003"):
        find_checkpoint(tmp_path, iteration=7)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere does not exist\. Correct --load"):
        find_checkpoint(tmp_path / "nowhere")


def test_a_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: .* is missing\..*--load"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [None, ""])
def test_only_half_written_checkpoints(tmp_path, content):
    save(tmp_path, 3, 6)
    cut(tmp_path, 3)
    cut(tmp_path, 6)
    tracker(tmp_path).unlink() if content is None else tracker(tmp_path).write_text(content)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint") as error:
        find_checkpoint(tmp_path)
    assert "iter_0000006: " in str(error.value)
    assert "iter_0000003: " in str(error.value)
    assert "ended while saving" in str(error.value)


def _legacy(folder):
    (folder / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
    tracker(folder).write_text("3")


def _deepspeed(folder):
    (folder / "global_step100").mkdir()
    (folder / "latest").write_text("global_step100")


def _hugging_face(folder):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")


def _plain_torch(folder):
    state = {"model": {"weight": torch.ones(2)}, "iteration": 3}
    target = folder / "iter_0000003"
    torch.distributed.checkpoint.save(state, checkpoint_id=target, no_dist=True)
    tracker(folder).write_text("3")


@pytest.mark.parametrize(
    ("make", "name", "advice"),
    [
        (_legacy, "legacy format", "--ckpt-convert-save"),
        (_deepspeed, "DeepSpeed's format", "ds_to_universal"),
        (_hugging_face, "Hugging Face's format", "convert hf-to-megatron"),
        (_plain_torch, "torch_dcp or fsdp_dtensor", "--ckpt-format torch_dist"),
    ],
)
def test_another_programs_checkpoint_is_named(tmp_path, make, name, advice):
    make(tmp_path)
    assert has_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=rf"a checkpoint in .*{name}.*torch_dist.*{advice}"):
        find_checkpoint(tmp_path)


def test_the_folder_of_one_iteration_is_recognised(tmp_path):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"folder of one iteration.*--ckpt-step"):
        find_checkpoint(tmp_path / "iter_0000003")


def test_a_new_run_folder_holds_nothing_yet(tmp_path):
    assert not has_checkpoint(tmp_path / "nowhere")
    assert not has_checkpoint(tmp_path)
    (tmp_path / "iter_0000003").mkdir()
    assert has_checkpoint(tmp_path)


@pytest.mark.parametrize("iteration", [3, "release"])
def test_a_written_tracker_is_found_without_a_word(tmp_path, iteration):
    save(tmp_path, iteration)
    tracker(tmp_path).write_text("")
    found = find_checkpoint(tmp_path)
    assert found.message is not None
    write_tracker(tmp_path, found)
    assert find_checkpoint(tmp_path) == FoundCheckpoint(found.folder, found.iteration)
    assert not list(tmp_path.glob(".latest*")), "the temporary file stayed"


def test_a_tracker_that_cannot_be_written_says_what_to_write(tmp_path):
    gone = tmp_path / "gone"
    with pytest.raises(CheckpointError, match=r"cannot be written .* Write '3' into that file"):
        write_tracker(gone, FoundCheckpoint(gone / "iter_0000003", 3))


def test_backends_other_than_torch_dist_are_no_fallback(tmp_path):
    save(tmp_path, 3)
    description = tmp_path / "iter_0000003" / "metadata.json"
    description.write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(CheckpointError, match="the format 'zarr'"):
        find_checkpoint(tmp_path)
