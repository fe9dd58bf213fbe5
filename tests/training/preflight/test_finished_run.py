"""A run that is started again after its last iteration says so, and leaves everything as it is."""

from argparse import Namespace

import pytest
import torch
from support.tiny_run import EXACT, SPARSE, read_records, trained

from megatron_switch.errors import CheckpointError
from megatron_switch.testing.checkpoints import save_checkpoint
from megatron_switch.training.preflight.finished_run import find_finished

LAST = 4  # of the smallest run


def arguments(folder, **changes):
    values = {
        "load": str(folder),
        "save": str(folder),
        "ckpt_step": None,
        "finetune": False,
        "skip_train": False,
        "ckpt_convert_format": None,
        "train_iters": 20,
        "train_samples": None,
    }
    return Namespace(**{**values, **changes})


@pytest.fixture
def folder(tmp_path):
    state = {"iteration": 20, "args": Namespace(consumed_train_samples=160)}
    save_checkpoint(tmp_path / "checkpoints", 20, {"weight": torch.zeros(2)}, state)
    return tmp_path / "checkpoints"


def test_a_run_at_its_end_is_finished_and_says_how_to_go_on(folder):
    finished = find_finished(arguments(folder))
    assert finished.ends_here
    assert finished.text == (
        f"This run is finished: {folder} is at iteration 20 of 20 (--train-iters), so nothing was "
        "done. To go on, raise --train-iters together with --override-opt_param-scheduler; to "
        "evaluate it again, add --skip-train."
    )


def test_samples_are_counted_where_they_are_the_measure(folder):
    samples = {"train_iters": None, "train_samples": 160}
    assert (
        "at sample 160 of 160 (--train-samples)" in find_finished(arguments(folder, **samples)).text
    )
    assert find_finished(arguments(folder, **(samples | {"train_samples": 161}))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"train_iters": 21},
        {"load": None},
        {"finetune": True},
        {"skip_train": True},
        {"ckpt_convert_format": "torch_dist"},
    ],
    ids=str,
)
def test_there_is_something_to_do(folder, changes):
    assert find_finished(arguments(folder, **changes)) is None


def test_weights_to_begin_with_are_no_finished_run(tmp_path):
    save_checkpoint(tmp_path, "release", {"weight": torch.zeros(2)}, {"iteration": 0})
    assert find_finished(arguments(tmp_path)) is None
    assert find_finished(arguments(tmp_path / "a first start")) is None


def test_another_run_that_is_finished_is_evaluated_and_that_is_said(folder):
    finished = find_finished(arguments(folder, save="elsewhere"))
    assert not finished.ends_here
    assert "at iteration 20 of 20 (--train-iters), so nothing is trained" in finished.text
    assert "add --finetune" in finished.text


def test_a_step_that_is_not_there_is_an_error(folder):
    with pytest.raises(CheckpointError, match="--ckpt-step 7"):
        find_finished(arguments(folder, ckpt_step=7))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_evaluated_or_written_again(data, tmp_path, ranks):
    folder = tmp_path / "run"
    flags = f"{EXACT} {data} --save-interval 3 --switch-run-dir {folder}"  # the last is not one
    trained(flags, ranks=ranks)
    before = contents(folder)
    again = trained(flags, ranks=ranks)
    assert again.screen == (
        f"This run is finished: {folder / 'checkpoints'} is at iteration {LAST} of {LAST} "
        "(--train-iters), so nothing was done. To go on, raise --train-iters together with "
        "--override-opt_param-scheduler; to evaluate it again, add --skip-train.\n"
    )
    assert contents(folder) == before


@pytest.mark.slow
def test_what_the_line_says_can_be_done(data, tmp_path):
    folder = tmp_path / "run"
    flags = f"{EXACT} {data} --switch-run-dir {folder}"
    trained(flags)
    saved = contents(folder / "checkpoints")
    evaluated = trained(f"{flags} --skip-train")
    assert "validation loss at iteration 4" in evaluated.screen
    assert contents(folder / "checkpoints") == saved
    trained(f"{flags} --train-iters {LAST + 1} --override-opt_param-scheduler")
    assert read_records(folder / "metrics.jsonl")[-1]["iteration"] == LAST + 1


@pytest.mark.slow
def test_a_finished_run_is_loaded_from_elsewhere_with_a_word(data, tmp_path):
    flags = f"{SPARSE} {data} --save-interval {LAST}"
    trained(f"{flags} --save {tmp_path / 'one'}")
    again = trained(f"{flags} --load {tmp_path / 'one'} --save {tmp_path / 'two'}")
    assert f"{tmp_path / 'one'} is at iteration {LAST} of {LAST}" in again.screen
    assert "so nothing is trained" in again.screen


def contents(folder):
    """Return what every file of a folder holds, and when it was written."""
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
