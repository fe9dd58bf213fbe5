"""Old checkpoints are deleted as the flags say, and never the ones that a run may need."""

from argparse import Namespace

import pytest
import torch

from megatron_switch.checkpoint.load import retention as module
from megatron_switch.checkpoint.load.files import TRACKER
from megatron_switch.checkpoint.load.retention import Retention
from megatron_switch.testing.checkpoints import save_checkpoint

ALL = [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("newest", "every", "expected"),
    [
        (None, None, None),
        (3, None, Retention(3)),
        (None, 100, Retention(1, 100)),
        (3, 100, Retention(3, 100)),
    ],
)
def test_flags_of_megatron_and_ours_are_one_rule(newest, every, expected):
    args = Namespace(switch_keep_checkpoints=newest, save_retain_interval=every)
    assert Retention.from_args(args) == expected


@pytest.mark.parametrize(
    ("rule", "saved", "incomplete", "deleted"),
    [
        (Retention(2), 50, (), [10, 20, 30]),
        (Retention(1), 50, (), [10, 20, 30, 40]),
        (Retention(5), 50, (), []),
        (Retention(9), 50, (), []),
        (Retention(2, 20), 50, (), [10, 30]),
        (Retention(1, 50), 50, (), [10, 20, 30, 40]),
        (Retention(2), 50, (40,), [10, 20]),  # what is not complete does not count
        (Retention(2), 30, (), [10]),  # nothing behind the tracker: a save under way
        (Retention(2), 50, (20, 30, 40, 50), []),
    ],
)
def test_what_is_older_than_the_newest_is_superfluous(rule, saved, incomplete, deleted):
    assert rule.superfluous(ALL, saved, lambda each: each not in incomplete) == deleted


def folder_with(tmp_path, *iterations):
    for iteration in iterations:
        save_checkpoint(tmp_path, iteration, {"w": torch.zeros(1)}, {"iteration": iteration})
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != TRACKER)


def test_old_folders_are_deleted_and_named(tmp_path, capsys):
    folder = folder_with(tmp_path, 1, 2, 3, 4)
    (folder / "iter_0000001.incomplete").mkdir()
    Retention(2, 2).apply(folder).join()
    assert names(folder) == [
        *("iter_0000001.incomplete", "iter_0000002", "iter_0000003", "iter_0000004")
    ]
    assert capsys.readouterr().out == f"Deleting old checkpoints in {folder}: iter_0000001.\n"
    assert Retention(2, 2).apply(folder) is None


def test_weights_to_begin_with_and_links_stay(tmp_path):
    release = folder_with(tmp_path / "one", "release")
    assert Retention(1).apply(release) is None
    folder = folder_with(tmp_path / "two", 1, 2)
    (folder / "iter_0000001").rename(tmp_path / "elsewhere")
    (folder / "iter_0000001").symlink_to(tmp_path / "elsewhere")
    assert Retention(1).apply(folder) is None


def test_a_folder_that_cannot_be_deleted_ends_nothing(tmp_path, monkeypatch, capsys):
    folder = folder_with(tmp_path, 1, 2)

    def fail(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.shutil, "rmtree", fail)
    Retention(1).apply(folder).join()
    assert "iter_0000001 could not be deleted: [Errno 13] Permission" in capsys.readouterr().out
