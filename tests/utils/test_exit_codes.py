"""A user's error is a message and an exit code, once in a job of several ranks."""

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


def test_an_error_of_the_programs_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        reporting_errors(raising(ZeroDivisionError()))
