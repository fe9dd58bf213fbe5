"""Two processes never write into one folder; a missing lock or folder stops nobody."""

import errno
import fcntl

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.utils.folder_lock import FolderLock


def test_a_folder_that_does_not_exist_is_not_created(tmp_path):
    FolderLock(tmp_path / "new", "--save").acquire()
    assert not (tmp_path / "new").exists()


def test_one_process_at_a_time_has_a_folder(tmp_path):
    first = FolderLock(tmp_path, "--save")
    first.acquire()
    first.acquire()
    with pytest.raises(ConfigError, match=f"Another process is training in --save {tmp_path}"):
        FolderLock(tmp_path, "--save").acquire()
    first.release()
    FolderLock(tmp_path, "--save").acquire()


def test_a_file_system_without_locks_is_no_error(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    FolderLock(tmp_path, "--save").acquire()
    FolderLock(tmp_path, "--save").acquire()
