"""The command line: one table of commands, and errors that are messages."""

import logging
import os
import subprocess
import sys
import warnings

import pytest

from megatron_switch import __version__
from megatron_switch.cli import main
from megatron_switch.commands import check_binding
from megatron_switch.commands.table import COMMANDS


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


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"megatron-switch {__version__}\n"


@pytest.mark.parametrize("words", [[], ["trian"], ["--no-such-flag"]])
def test_no_command_is_a_mistake_of_use(capsys, words):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "usage: megatron-switch" in capsys.readouterr().err


@pytest.fixture
def runs(monkeypatch):
    """Return a function that puts another function in the place of a command's work."""
    return lambda work: monkeypatch.setattr(check_binding, "run", work)


def test_a_command_gets_its_arguments_and_its_code_is_the_programs(monkeypatch, runs):
    seen = []
    runs(lambda args: seen.append(args.all) or 7)
    monkeypatch.setattr(sys, "argv", ["megatron-switch", "check-binding", "--all"])
    assert main() == 7
    assert main(["check-binding"]) == 7
    assert seen == [True, False]


def raising(error):
    def run(args):
        raise error

    return run


def test_ctrl_c_ends_a_command_without_a_traceback(runs, capsys):
    runs(raising(KeyboardInterrupt()))
    assert main(["check-binding"]) == 130
    assert capsys.readouterr().err == "\nmegatron-switch: interrupted\n"


def test_libraries_do_not_tell_what_is_not_installed(runs):
    runs(lambda args: 0)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        main(["check-binding"])
        warnings.warn("Transformer Engine and Apex are not installed.", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert [str(each.message) for each in heard] == ["something else"]


@pytest.mark.parametrize("words", [["--help"], ["--num-layers", "3", "-h"]])
def test_train_helps_with_the_flags_that_are_ours(capsys, words):
    with pytest.raises(SystemExit, match="0"):
        main(["train", *words])
    text = capsys.readouterr().out
    assert "--switch-capacity-group {microbatch,sequence,ep}" in text
    assert "--tensor-model-parallel-size" not in text
    assert "docs/flags.md" in text
    assert " ".join(text.split()).count("Default: microbatch.") == 1


@pytest.mark.parametrize("command", [["train"], ["launch-local", "-n", "2"]])
def test_train_helps_with_every_flag_on_demand(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help-all"])
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
        (["prepare", "--workers", "many"], 2),
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
        (["rehearse", "--world-size", "8", "--", "--num-expert", "8"], 2),
        (["train", "--help"], 0),
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


@pytest.mark.parametrize("flush", [True, False])
def test_a_reader_that_has_gone_ends_a_command_without_a_traceback(flush):
    code = (
        "from megatron_switch.cli import main\n"
        "from megatron_switch.commands import check_binding\n"
        f"check_binding.run = lambda args: print('x', flush={flush})\n"
        "raise SystemExit(main(['check-binding']))"
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


def test_a_broken_pipe_that_is_not_the_screen_keeps_its_traceback(runs):
    runs(raising(BrokenPipeError()))
    with pytest.raises(BrokenPipeError):
        main(["check-binding"])


def test_a_process_without_streams_gets_some(monkeypatch, runs):
    runs(lambda args: print("x") or 0)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["check-binding"]) == 0
    assert sys.stdout.name == sys.stderr.name == os.devnull
    sys.stdout.close()
    sys.stderr.close()
