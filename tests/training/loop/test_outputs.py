"""Folders are locked by their flags, and how a start ended is recorded in a few words."""

from argparse import Namespace

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.training.loop import outputs
from megatron_switch.training.loop.outputs import RunOutputs, ending, host_names


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (None, 0, "finished"),
        (SystemExit(0), 0, "a flag that ends it early, such as --exit-interval"),
        (KeyboardInterrupt(), 130, "SIGINT"),
        (ConfigError("No room.\nFree some."), 2, "ConfigError: No room."),
        (RuntimeError("x" * 900), 1, "RuntimeError: " + "x" * 186),
        (SystemExit(3), 1, "SystemExit: 3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_how_a_training_ended(error, code, reason):
    assert ending(error) == (code, reason)


def arguments(**changes):
    values = {"rank": 0, "world_size": 1, "fake_process_group": False, "skip_train": False}
    places = {"switch_run_dir": None, "save": None}
    return Namespace(**{**values, **places, **changes})


@pytest.mark.parametrize("changes", [{"rank": 1}, {"fake_process_group": True}], ids=str)
def test_one_rank_of_a_real_run_records(changes):
    class Folder:
        def record_end(self, **_):
            raise AssertionError("only one rank writes")

    RunOutputs(arguments(**changes), Folder()).record_end(None, None, 0)
    with pytest.raises(AssertionError, match="only one rank writes"):
        RunOutputs(arguments(), Folder()).record_end(None, None, 0)


@pytest.mark.parametrize(
    ("changes", "error", "iteration"),
    [
        ({"curr_iteration": 4}, None, 5),
        ({"curr_iteration": 4}, SystemExit(0), 5),
        ({"curr_iteration": 4}, RuntimeError(), 4),
        ({"iteration": 3}, RuntimeError(), 3),  # before the first step
        ({"iteration": 3, "curr_iteration": 4, "skip_train": True}, None, 3),
    ],
    ids=str,
)
def test_the_last_iteration_is_one_that_was_completed(changes, error, iteration):
    class Folder:
        def record_end(self, **record):
            self.record = record

    folder = Folder()
    RunOutputs(arguments(**changes), folder).record_end(error, None, 0)
    assert folder.record["iteration"] == iteration


def test_a_disk_that_is_full_at_the_end_hides_no_error():
    class Folder:
        def record_end(self, **_):
            raise OSError(28, "No space left on device")

    RunOutputs(arguments(), Folder()).record_end(RuntimeError("the cause"), None, 0)


def test_a_run_that_saves_nothing_locks_no_folder_of_checkpoints(tmp_path):
    for name in ("run", "save"):
        (tmp_path / name).mkdir()
    places = {"switch_run_dir": str(tmp_path / "run"), "save": str(tmp_path / "save")}
    first = outputs._locks(arguments(**places))
    for lock in first:
        lock.acquire()
    for flag in ("switch_run_dir", "save"):
        (lock,) = outputs._locks(arguments(**{flag: places[flag]}))
        with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} {places[flag]}"):
            lock.acquire()
    assert outputs._locks(arguments(save=places["save"], skip_train=True)) == []
    for lock in first:
        lock.release()


def test_the_host_of_each_rank_is_known_on_all():
    run_ranks(_check_host_names, 2)
    assert len(host_names(arguments(world_size=3, fake_process_group=True))) == 3


def _check_host_names(rank):
    outputs.socket.gethostname = lambda: f"node{rank}"
    assert host_names(arguments(world_size=2)) == ["node0", "node1"]
