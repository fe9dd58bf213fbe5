"""A place that cannot be written is found out before training, not at the first save."""

from argparse import Namespace

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.training.write_targets import check_write_targets


def targets(**given):
    names = ("switch_run_dir", "save", "tensorboard_dir", "switch_metrics_file")
    return Namespace(**{name: str(given[name]) if name in given else None for name in names})


def test_folders_are_made_and_left_empty(tmp_path):
    check_write_targets(
        targets(save=tmp_path / "a" / "b", switch_metrics_file=tmp_path / "c" / "metrics.jsonl")
    )
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
