"""The output folder shows finished work only, and unfinished work goes on where it was."""

import json
import shutil
from types import SimpleNamespace

import pytest

from megatron_switch.data.preparation.workspace import Workspace, fingerprint_of
from megatron_switch.errors import ConfigError, DataError

RESULTS = ["corpus.bin", "corpus.idx", "prepared.json"]


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "out", fingerprint_of("settings"))


def other(workspace):
    return Workspace(workspace.output, fingerprint_of("other settings"))


def make_results(workspace, *, text="tokens", names=("corpus.bin", "corpus.idx")):
    for name in names:
        (workspace.folder / name).write_text(text)


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_fingerprints_follow_values():
    assert fingerprint_of({"a": 1, "b": [None]}) == fingerprint_of({"b": [None], "a": 1})
    assert fingerprint_of({"a": 1}) != fingerprint_of({"a": 2})


def test_results_appear_together_and_nothing_else_stays(workspace):
    workspace.check_output(overwrite=False)
    with workspace.opened() as start:
        assert start == "new"
        make_results(workspace)
        assert listing(workspace.output) == [".preparing"]
        workspace.publish({"tokens": 3})
    assert listing(workspace.output) == RESULTS
    report = json.loads((workspace.output / "prepared.json").read_text())
    assert report == {"tokens": 3, "fingerprint": workspace.fingerprint}
    assert workspace.finished_report() == report
    assert other(workspace).finished_report() is None


def test_unfinished_work_is_resumable_with_the_same_settings_only(workspace):
    with workspace.opened():
        make_results(workspace)
    assert workspace.is_resumable()
    with workspace.opened() as start:
        assert start == "resumed"
        assert (workspace.folder / "corpus.bin").exists()
    with other(workspace).opened() as start:
        assert start == "restarted"
        assert listing(workspace.folder) == ["lock", "state.json"]
    assert not workspace.is_resumable()


def test_a_damaged_state_starts_again(workspace):
    with workspace.opened():
        make_results(workspace)
    (workspace.folder / "state.json").write_text("{")
    with workspace.opened() as start:
        assert start == "restarted"
        assert not (workspace.folder / "corpus.bin").exists()


def test_other_results_are_replaced_only_when_asked(workspace):
    workspace.output.mkdir()
    for name in ("corpus.bin", "corpus.idx"):
        (workspace.output / name).write_text("of a user")
    with pytest.raises(ConfigError, match=r"already holds corpus\.idx, corpus\.bin.*--overwrite"):
        workspace.check_output(overwrite=False)
    workspace.check_output(overwrite=True)


def test_replacing_removes_what_the_new_results_do_not_have(workspace):
    with workspace.opened():
        make_results(workspace, names=("corpus.bin", "corpus.idx", "tokenizer.model"))
        workspace.publish({})
    with other(workspace).opened():
        make_results(workspace, text="new tokens")
        other(workspace).publish({})
    assert listing(workspace.output) == RESULTS
    assert (workspace.output / "corpus.bin").read_text() == "new tokens"


@pytest.mark.parametrize("renames", [0, 1])
def test_dying_while_publishing_leaves_no_usable_half(workspace, monkeypatch, renames):
    """Old results are there, and the process dies after so many renames of new ones."""
    with workspace.opened():
        make_results(workspace, text="old")
        workspace.publish({})
    new = other(workspace)
    new.check_output(overwrite=True)
    path_type = type(workspace.output)
    replace = path_type.replace
    calls = []

    def dying(path, target):
        if path.name.startswith("corpus"):
            calls.append(path.name)
            if len(calls) > renames:
                raise KeyboardInterrupt
        return replace(path, target)

    with new.opened():
        make_results(new, text="new")
        monkeypatch.setattr(path_type, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            new.publish({})
        monkeypatch.undo()
    assert "corpus.idx" not in listing(new.output)
    assert "prepared.json" not in listing(new.output)
    new.check_output(overwrite=False)  # what is left is ours
    with new.opened() as start:
        assert start == "resumed"
        make_results(new, text="new")
        new.publish({})
    assert (new.output / "corpus.idx").read_text() == "new"


def test_the_output_must_be_a_folder(workspace):
    workspace.output.write_text("")
    with pytest.raises(ConfigError, match=r"--output .*out is a file; give a folder"):
        workspace.check_output(overwrite=True)


def test_two_preparations_do_not_share_a_folder(workspace):
    with (
        workspace.opened(),
        pytest.raises(ConfigError, match=r"Another megatron-switch prepare is writing to --output"),
        other(workspace).opened(),
    ):
        pass
    with other(workspace).opened():
        pass


def test_too_little_space_is_said_before(workspace, monkeypatch):
    workspace.output.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=3 * 2**30))
    workspace.check_space(2 * 2**30)
    with pytest.raises(DataError, match=r"about 4\.00 GiB in --output .* and 3\.00 GiB are free"):
        workspace.check_space(4 * 2**30)
