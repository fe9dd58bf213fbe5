"""The command line: one table of commands, and errors that are messages."""

import logging
import os
import signal
import subprocess
import sys
import warnings

import pytest

from megatron_switch import __version__, cli
from megatron_switch.cli import COMMANDS, Command, main, reporting_errors
from megatron_switch.errors import CheckpointError, ConfigError, DataError
from megatron_switch.training.logs.run_folder import COMMAND_VARIABLE


@pytest.fixture(autouse=True)
def _libraries_are_heard_again():
    logger = logging.getLogger("torch.utils.cpp_extension")
    before = logger.level
    yield
    logger.setLevel(before)


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name:<16}{command.summary}" in text


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"megatron-switch {__version__}\n"


@pytest.mark.parametrize("words", [[], ["trian"], ["--no-such-flag"]])
def test_no_command_is_a_mistake_of_use(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "usage: megatron-switch" in capsys.readouterr().err


def test_a_command_gets_its_words_and_its_code_is_the_programs(monkeypatch):
    seen = []
    command = Command("for this test", lambda words: seen.append(words) or 7)
    monkeypatch.setitem(COMMANDS, "try", command)
    monkeypatch.setattr(sys, "argv", ["megatron-switch", "try", "--a", "b"])
    assert main() == 7
    assert main(["try"]) == 7
    assert seen == [["--a", "b"], []]


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setitem(
        COMMANDS, "try", Command("for this test", raising_with(KeyboardInterrupt()))
    )
    assert main(["try"]) == 130
    assert capsys.readouterr().err == "\nmegatron-switch: interrupted\n"


def raising_with(error):
    return lambda words: raising(error)()


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
        cli.time, "sleep", lambda _: on_signal.append(signal.getsignal(signal.SIGTERM))
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


def test_libraries_do_not_tell_what_is_not_installed(monkeypatch):
    monkeypatch.setitem(COMMANDS, "try", Command("for this test", lambda words: 0))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        main(["try"])
        warnings.warn("Transformer Engine and Apex are not installed.", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [str(each.message) for each in heard] == ["something else"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help"], ["--num-layers", "3", "-h"]])
def test_train_helps_with_the_flags_that_are_ours(capsys, words):
    assert main(["train", *words]) == 0
    text = capsys.readouterr().out
    assert "--switch-capacity-group {microbatch,sequence,ep}" in text
    assert "--tensor-model-parallel-size" not in text
    assert "docs/flags.md" in text
    assert " ".join(text.split()).count("Default: microbatch.") == 1


@pytest.mark.parametrize("command", [["train"], ["launch-local", "-n", "2"]])
def test_train_helps_with_every_flag_on_demand(capsys, command):
    assert main([*command, "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--tensor-model-parallel-size TENSOR_MODEL_PARALLEL_SIZE" in text
    assert "--switch-capacity-group {microbatch,sequence,ep}" in text
    assert "Default: aux_loss." in text  # Switch's default of --moe-router-load-balancing-type


LIGHT = """
import sys
from megatron_switch.cli import main
try:
    code = main({words!r})
except SystemExit as end:
    code = end.code
assert code == {code}, code
print([name for name in ("torch", "megatron.core") if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["generate", "--help"], 0),
        (["generate", "--seed"], 2),
        (["experts", "--help"], 0),
        (["experts", "--sequences", "many"], 2),
        (["demo", "--help"], 0),
        (["demo", "--iterations", "many"], 2),
        (["capacity-sweep", "--help"], 0),
        (["capacity-sweep", "folder", "--samples", "many"], 2),
        (["capacity-sweep", "folder", "--load", "folder"], 2),
        (["convert", "--help"], 0),
        (["convert", "inspect"], 2),
        (["reshard", "--help"], 0),
        (["upcycle", "--num-experts", "many"], 2),
        (["check-layouts", "--help"], 0),
        (["check-layouts", "--device", "tpu"], 2),
        (["launch-local", "--help"], 0),
        (["launch-local", "-n"], 2),
        (["launch-local", "-n", "2", "--num-expert", "8"], 2),
        (["train", "--num-expert", "8"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_help_and_slips_do_not_wait_for_torch(words, code):
    program = LIGHT.format(words=words, code=code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("demo", ["folder for data and run (runs/demo)", "training iterations (200)"]),
        ("prepare", ["a tokenizer is trained: 32000", "Ids that TikTokenizer keeps"]),
    ],
)
def test_help_shows_defaults(capsys, command, shown):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for each in shown:
        assert each in text
    assert "None" not in text


def test_launch_local_passes_flags_on_and_leaves_its_command_for_resume(monkeypatch):
    launched, trained = [], []
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    monkeypatch.setattr(
        "megatron_switch.emulation.launch", lambda n, target: launched.append(n) or target()
    )
    monkeypatch.setattr(cli, "_train", lambda flags: trained.append(flags) or 5)
    assert main(["launch-local", "-n", "2", "--data-path", "my text"]) == 5
    assert launched == [2]
    assert trained == [["--switch-device", "cpu", "--data-path", "my text"]]
    left = os.environ.pop(COMMAND_VARIABLE)
    expected = f"{sys.executable} -m megatron_switch launch-local -n 2 --data-path 'my text'"
    assert left == expected


@pytest.mark.parametrize(
    ("words", "message"), [([], "-n/--num-ranks"), (["-n", "0"], "at least 1, got 0")]
)
def test_launch_local_needs_a_number_of_ranks(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(["launch-local", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flush", [True, False])
def test_a_reader_that_has_gone_ends_a_command_without_a_traceback(flush):
    code = (
        "from megatron_switch.cli import COMMANDS, Command, main\n"
        f"COMMANDS['try'] = Command('', lambda words: print('x', flush={flush}))\n"
        "raise SystemExit(main(['try']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as screen:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            stdout=screen,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_broken_pipe_that_is_not_the_screen_keeps_its_traceback(monkeypatch):
    monkeypatch.setitem(COMMANDS, "try", Command("for this test", raising_with(BrokenPipeError())))
    with pytest.raises(BrokenPipeError):
        main(["try"])


def test_a_process_without_streams_gets_some(monkeypatch):
    monkeypatch.setitem(COMMANDS, "try", Command("for this test", lambda words: print("x") or 0))
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["try"]) == 0
    assert sys.stdout.name == sys.stderr.name == os.devnull
    sys.stdout.close()
    sys.stderr.close()
