"""A user's error is a message and an exit code, once in a job of several ranks."""

import errno
import os
import signal

import pytest

from megatron_switch.errors import CheckpointError, ConfigError, DataError
from megatron_switch.utils import exit_codes
from megatron_switch.utils.exit_codes import reporting_errors


def raising(error):
    def run():
        raise error

    return run


@pytest.mark.parametrize("error", [ConfigError("no"), DataError("no"), CheckpointError("no")])
def test_an_error_of_the_users_is_its_message_and_code_2(capsys, error):
    assert reporting_errors(raising(error)) == 2
    assert capsys.readouterr().err == "\nmegatron-switch: error: no\n"


def test_other_ranks_give_rank_0_time_and_then_name_themselves(capsys, monkeypatch):
    on_signal = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(
        exit_codes.time, "sleep", lambda _: on_signal.append(signal.getsignal(signal.SIGTERM))
    )
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # training saves on it
    try:
        assert reporting_errors(raising(ConfigError("no"))) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "\nmegatron-switch: error (rank 3): no\n"
    assert on_signal == [signal.SIG_DFL]  # a launcher ends it at once, before it repeats rank 0


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "Permission denied. Give this user access to it, or name another one."),
        (errno.ENOSPC, "No space left on device. Free some space, or name a folder on another"),
        (errno.EIO, "Input/output error. Check its disk"),
        (errno.ENAMETOOLONG, "File name too long. Name a shorter one."),
        (errno.ELOOP, "Its symbolic links lead in a circle"),
        (errno.EMFILE, "ulimit -n"),
    ],
)
def test_a_path_that_the_system_refuses_is_an_error_of_the_users(capsys, number, words):
    assert reporting_errors(raising(OSError(number, os.strerror(number), "a b"))) == 2
    message = capsys.readouterr().err
    assert message.startswith("\nmegatron-switch: error: a b cannot be used: ")
    assert words in message


class OutOfMemoryError(RuntimeError):
    """Named as torch's is."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_an_error_of_the_users(capsys, error):
    assert reporting_errors(raising(error)) == 2
    message = capsys.readouterr().err
    assert f"There is not enough memory. {error}" in message
    assert "Smaller are --micro-batch-size and --seq-length" in message


@pytest.mark.parametrize("error", [RuntimeError("no"), FileNotFoundError(errno.ENOENT, "no")])
def test_an_error_of_the_programs_keeps_its_traceback(error):
    with pytest.raises(type(error)):
        reporting_errors(raising(error))
