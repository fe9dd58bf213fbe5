"""A target is whole or absent, whatever happens while it is written."""

import errno
import os
import shutil
import signal
import time
from collections import namedtuple

import pytest

from megatron_switch.checkpoint.formats.atomic_folder import folder_put_in_place
from megatron_switch.errors import CheckpointError

Usage = namedtuple("Usage", "total used free")


def put(target, needed_bytes=0):
    return folder_put_in_place(target, needed_bytes=needed_bytes, flag="--save")


def test_the_target_appears_when_all_is_written(tmp_path):
    with put(tmp_path / "a" / "target") as folder:
        (folder / "file").write_text("whole")
        assert not (tmp_path / "a" / "target").exists()
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["target"]
    assert [p.name for p in (tmp_path / "a" / "target").iterdir()] == ["file"]


def test_nothing_is_left_after_an_error(tmp_path):
    def interrupted():
        with put(tmp_path / "target") as folder:
            (folder / "file").write_text("half")
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def no_space(note: str = "") -> OSError:
    return OSError(errno.ENOSPC, "No space left on device" + note)


def because(error: Exception, cause: Exception | None = None) -> Exception:
    error.__context__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (no_space(), r"nothing of it is left: .*No space left on device\. Free some space or"),
        (because(RuntimeError("unexpected pos"), no_space()), r"No space left on device\. Free"),
        (OSError(errno.EIO, "Input/output error", "a"), r"error: 'a'\. Check that file and"),
    ],
)
def test_a_disk_that_fails_meanwhile_is_told(tmp_path, error, words):
    with pytest.raises(CheckpointError, match=rf"--save .*target could not be .* {words}"):
        fail_while_writing(tmp_path, error)
    assert list(tmp_path.iterdir()) == []


def fail_while_writing(folder, error):
    with put(folder / "target") as partial:
        (partial / "file").write_text("half")
        raise error


def test_a_message_about_a_source_stays_as_it_is(tmp_path):
    with pytest.raises(CheckpointError, match=r"^the source is damaged$"):
        fail_while_writing(tmp_path, because(CheckpointError("the source is damaged"), no_space()))


def test_a_link_in_the_way_is_not_followed(tmp_path):
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").write_text("theirs")
    (tmp_path / ".target.partial").symlink_to(tmp_path / "others")
    with (
        pytest.raises(CheckpointError, match="A symbolic link is in the way"),
        put(tmp_path / "target"),
    ):
        pass
    assert (tmp_path / "others" / "file").read_text() == "theirs"


def test_an_existing_target_is_refused(tmp_path):
    (tmp_path / "target").mkdir()
    with (
        pytest.raises(CheckpointError, match=r"--save .* already exists"),
        put(tmp_path / "target"),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_a_target_that_came_meanwhile_is_not_overwritten(tmp_path):
    with pytest.raises(CheckpointError, match="already exists"), put(tmp_path / "target"):
        (tmp_path / "target").mkdir()
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_a_full_disk_is_noticed_before_the_first_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 2**30))
    with (
        pytest.raises(CheckpointError, match=r"needs 1.06 GiB, but its disk has 1.00 GiB free"),
        put(tmp_path / "target", needed_bytes=2**30),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_two_at_the_same_time_are_refused(tmp_path):
    with put(tmp_path / "target") as folder:
        (folder / "file").write_text("mine")
        with pytest.raises(CheckpointError, match="Another process"), put(tmp_path / "target"):
            pass
    assert (tmp_path / "target" / "file").read_text() == "mine"


def test_what_a_killed_process_left_is_started_over(tmp_path):
    pid = os.fork()
    if pid == 0:
        with put(tmp_path / "target") as folder:
            (folder / "release").mkdir()
            (folder / "release" / "old").write_text("half")
            (tmp_path / "started").write_text("")
            time.sleep(60)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not (tmp_path / "target").exists()
    with put(tmp_path / "target") as folder:
        (folder / "new").write_text("whole")
    assert [p.name for p in (tmp_path / "target").iterdir()] == ["new"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"--save .* cannot be written"),
        put(tmp_path / "file" / "target"),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_process_and_leaves_nothing(tmp_path, number):
    def write():
        with put(tmp_path / "new") as folder:
            (folder / "file").touch()
            signal.raise_signal(number)

    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as error:
            write()
        assert error.value.code == 128 + number
        assert list(tmp_path.iterdir()) == []
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
