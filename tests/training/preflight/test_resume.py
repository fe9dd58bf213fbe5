"""What is loaded, and whether anything is left to train, is decided from the files alone."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from support.tiny_run import EXACT, SPARSE, read_records, trained

from megatron_switch.checkpoint.load.files import TRACKER
from megatron_switch.errors import CheckpointError, ConfigError
from megatron_switch.testing.checkpoints import save_checkpoint
from megatron_switch.training.preflight import resume
from megatron_switch.training.preflight.resume import (
    clear_the_way,
    find_finished,
    find_what_to_load,
    keep_own_progress,
)

LAST = 4  # of the smallest run


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
        "skip_train": False,
        "finetune": False,
        "ckpt_convert_format": None,
        "switch_run_dir": None,
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
    monkeypatch.setattr(resume, "check_resume", lambda state, args, **_: ("compared",))
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


def interrupt(folder, iteration):
    """Leave of a save what a job leaves that is killed meanwhile."""
    (save(folder, iteration) / "metadata.json").unlink()
    (folder / TRACKER).unlink()


@pytest.mark.parametrize("load", ["own", None, "another"])
def test_after_a_first_save_that_was_interrupted_the_run_begins_again(folder, tmp_path, load):
    interrupt(folder, 5)
    save(tmp_path / "another", 3)
    places = {"own": str(folder), None: None, "another": str(tmp_path / "another")}
    args = own_run(folder, load=places[load])
    assert find_finished(args) is None
    notes = find_what_to_load(args)
    assert notes[0] == (
        f"The first save into {folder} was interrupted: what there is of iter_0000005 is renamed "
        "to *.incomplete, and training begins again."
    )
    assert args.load == (places[load] if load == "another" else None)
    assert (folder / "iter_0000005").exists()  # other ranks may not have looked yet
    for number in ("", "1"):
        clear_the_way(args)
        assert list((folder / f"iter_0000005.incomplete{number}").glob("*.distcp"))
        assert not (folder / "iter_0000005").exists()
        interrupt(folder, 5)


def test_what_was_saved_completely_is_never_renamed(folder):
    save(folder, 5)
    (folder / TRACKER).unlink()
    clear_the_way(own_run(folder))
    assert (folder / "iter_0000005").exists()
    (folder / "iter_0000005" / "metadata.json").unlink()
    clear_the_way(own_run(folder, skip_train=True))  # which saves nothing
    assert (folder / "iter_0000005").exists()


def test_a_tracker_names_what_ckpt_step_has_loaded(folder):
    save(folder, 3)
    save(folder, 5)
    for changes in ({"skip_train": True}, {"save": "elsewhere"}):
        clear_the_way(own_run(folder, ckpt_step=3, **changes))
        assert (folder / TRACKER).read_text() == "5"
    clear_the_way(own_run(folder, ckpt_step=3))
    assert (folder / TRACKER).read_text() == "3"


@pytest.mark.parametrize("count", ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"])
def test_ckpt_step_is_where_the_first_start_of_a_job_begins(folder, count):
    save(folder, 3)
    save(folder, 5)
    for environ in ({}, {count: "0"}):
        args = own_run(folder, ckpt_step=3)
        assert keep_own_progress(args, environ) == ()
        assert args.ckpt_step == 3
    (note,) = keep_own_progress(args, {count: "1"})
    assert note.startswith("--ckpt-step 3 was where this job began")
    assert args.ckpt_step is None
    args = own_run(folder, ckpt_step=3, save="elsewhere")
    assert keep_own_progress(args, {count: "1"}) == ()
    assert args.ckpt_step == 3


@pytest.mark.parametrize(
    ("load", "begins"),
    [("another", "from --load another"), (None, "from new weights")],
)
def test_checkpoints_that_a_run_does_not_continue_are_not_saved_over(folder, load, begins):
    save(folder, 3)
    message = rf"--save {folder} holds .* begins {begins}: .*give --load {folder}; else .* --save"
    with pytest.raises(ConfigError, match=message):
        keep_own_progress(own_run(folder, load=load), {})
    for nothing_saved in ({"skip_train": True}, {"ckpt_convert_format": "torch_dist"}):
        assert keep_own_progress(own_run(folder, load=load, **nothing_saved), {}) == ()
    interrupt(folder, 5)
    assert keep_own_progress(own_run(folder.parent / "new", load=load), {}) == ()


@pytest.mark.parametrize(("load", "began"), [("another", "--load another"), (None, "new weights")])
def test_a_restart_continues_what_its_job_has_saved(folder, load, began):
    save(folder, 3)
    args = own_run(folder, load=load, finetune=True, ckpt_step=9)
    (note,) = keep_own_progress(args, {"SLURM_RESTART_COUNT": "2"})
    assert note == f"This restart continues from {folder}; its job began from {began}."
    assert (args.load, args.finetune, args.ckpt_step) == (str(folder), False, None)


def test_one_folder_may_be_spelled_in_two_ways(folder):
    save(folder, 3)
    args = own_run(folder, load=f"{folder}/../checkpoints/", ckpt_step=3)
    assert keep_own_progress(args, {}) == ()
    assert args.load == args.save


def test_the_folder_of_a_run_is_not_one_of_checkpoints(tmp_path):
    (tmp_path / "run.json").touch()
    with pytest.raises(ConfigError, match=r"is the folder of a run\. .*--switch-run-dir"):
        keep_own_progress(own_run(tmp_path), {})
    assert keep_own_progress(own_run(tmp_path, switch_run_dir=str(tmp_path)), {}) == ()


def test_finetune_needs_a_folder_of_its_own(folder):
    save(folder, 3)
    with pytest.raises(ConfigError, match=r"--finetune begins again.*another folder to --save"):
        keep_own_progress(own_run(folder, finetune=True), {})
    for allowed in ({"skip_train": True}, {"save": "elsewhere"}):
        assert keep_own_progress(own_run(folder, finetune=True, **allowed), {}) == ()


def own_run(folder, **changes):
    values = {
        "load": str(folder),
        "save": str(folder),
        "train_iters": 20,
        "train_samples": None,
    }
    return arguments(folder, **{**values, **changes})


@pytest.fixture
def finished_run(tmp_path):
    state = {"iteration": 20, "args": Namespace(consumed_train_samples=160)}
    save_checkpoint(tmp_path / "checkpoints", 20, {"weight": torch.zeros(2)}, state)
    return tmp_path / "checkpoints"


def test_a_run_at_its_end_is_finished_and_says_how_to_go_on(finished_run):
    finished = find_finished(own_run(finished_run))
    assert finished.ends_here
    assert finished.text == (
        f"This run is finished: {finished_run} is at iteration 20 of 20 (--train-iters), so "
        "nothing was done. To continue, raise --train-iters together with "
        "--override-opt_param-scheduler; to evaluate it again, add --skip-train."
    )


def test_samples_are_counted_where_they_are_the_measure(finished_run):
    samples = {"train_iters": None, "train_samples": 160}
    assert (
        "at sample 160 of 160 (--train-samples)"
        in find_finished(own_run(finished_run, **samples)).text
    )
    assert find_finished(own_run(finished_run, **(samples | {"train_samples": 161}))) is None


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
def test_there_is_something_to_do(finished_run, changes):
    assert find_finished(own_run(finished_run, **changes)) is None


def test_weights_to_begin_with_are_no_finished_run(tmp_path):
    save_checkpoint(tmp_path, "release", {"weight": torch.zeros(2)}, {"iteration": 0})
    assert find_finished(own_run(tmp_path)) is None
    assert find_finished(own_run(tmp_path / "a first start")) is None


def test_another_run_that_is_finished_is_evaluated_and_that_is_said(finished_run):
    finished = find_finished(own_run(finished_run, save="elsewhere"))
    assert not finished.ends_here
    assert "at iteration 20 of 20 (--train-iters), so nothing is trained" in finished.text
    assert "add --finetune" in finished.text


def test_a_step_that_is_not_there_is_an_error(finished_run):
    with pytest.raises(CheckpointError, match="--ckpt-step 7"):
        find_finished(own_run(finished_run, ckpt_step=7))


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
        "(--train-iters), so nothing was done. To continue, raise --train-iters together with "
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
