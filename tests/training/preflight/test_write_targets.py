"""A place that cannot be written is found out before training, not at the first save."""

import errno
from argparse import Namespace

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.training.preflight import write_targets
from megatron_switch.training.preflight.write_targets import (
    check_write_targets,
    explain_full_disk,
    make_write_targets,
)


def targets(**given):
    names = ("switch_run_dir", "save", "tensorboard_dir", "switch_metrics_file")
    places = {name: str(given[name]) if name in given else None for name in names}
    wandb = {"wandb_project": "", "wandb_exp_name": "", "wandb_save_dir": ""}
    return Namespace(**places, **{name: given.get(name, value) for name, value in wandb.items()})


def test_folders_are_made_only_after_the_check_and_left_empty(tmp_path):
    places = targets(
        save=tmp_path / "a" / "b", switch_metrics_file=tmp_path / "c" / "metrics.jsonl"
    )
    check_write_targets(places)
    assert list(tmp_path.iterdir()) == []
    make_write_targets(places)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("switch_run_dir", "--switch-run-dir"),
        ("save", "--save"),
        ("tensorboard_dir", "--tensorboard-dir"),
    ],
)
def test_a_file_where_a_folder_must_be_is_refused(tmp_path, name, flag):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"Nothing can be written to {flag} {place}: "):
            check_write_targets(targets(**{name: place}))


def test_a_file_system_that_takes_no_folder_is_refused():
    with pytest.raises(ConfigError, match="Nothing can be written to --save /proc/nowhere: "):
        check_write_targets(targets(save="/proc/nowhere"))


def test_metrics_go_into_a_file(tmp_path):
    with pytest.raises(ConfigError, match=f"--switch-metrics-file {tmp_path} is a folder"):
        check_write_targets(targets(switch_metrics_file=tmp_path))


def test_a_place_that_has_become_unusable_is_named(tmp_path):
    places = targets(save=tmp_path / "a")
    check_write_targets(places)
    (tmp_path / "a").write_text("")
    with pytest.raises(ConfigError, match=f"Nothing can be written to --save {tmp_path / 'a'}: "):
        make_write_targets(places)


def test_relative_places_are_tried_where_they_will_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_write_targets(targets(save="a/b", switch_metrics_file="metrics.jsonl"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_weights_and_biases_needs_package_name_and_folder(monkeypatch, tmp_path):
    project = {"wandb_project": "p"}
    monkeypatch.setattr(write_targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--wandb-project p needs the package wandb.*pip inst"):
        check_write_targets(targets(**project))
    monkeypatch.setattr(write_targets.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=r"--wandb-project p needs a name .*--wandb-exp-name"):
        check_write_targets(targets(**project))
    project["wandb_exp_name"] = "n"
    with pytest.raises(ConfigError, match=r"--wandb-project p needs a folder .*--switch-run-dir"):
        check_write_targets(targets(**project))
    check_write_targets(targets(**project, save=tmp_path))
    check_write_targets(targets(**project, wandb_save_dir=str(tmp_path)))


def test_a_full_disk_is_explained_and_other_errors_are_not(tmp_path):
    places = targets(save=tmp_path, tensorboard_dir="board")
    message = rf"no room left .*No space left.*\(--save {tmp_path}, --tensorboard-dir board\)"
    with pytest.raises(ConfigError, match=message):
        explain_full_disk(OSError(errno.ENOSPC, "No space left on device"), places)
    with pytest.raises(ConfigError, match=r"another place \(TMPDIR\)"):
        explain_full_disk(OSError(errno.EDQUOT, "Disk quota exceeded"), targets())
    explain_full_disk(FileNotFoundError(errno.ENOENT, "gone"), places)
