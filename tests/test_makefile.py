"""What ``make`` would do, told by make itself without doing it."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def would_run(target, *words):
    """Return the commands that ``make target`` would run."""
    # Without the flags of the make that may run this test.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    return subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target, *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def stamps(text):
    (line,) = [line for line in text.splitlines() if line.startswith("touch ")]
    return [Path(word) for word in line.split()[1:]]


@pytest.mark.parametrize(
    ("target", "installed"),
    [
        ("demo", "--editable '.'"),
        ("setup", "--editable '.[test,dev]'"),
        ("test", "--editable '.[test,dev]'"),
        ("lint", "--editable '.[test,dev]'"),
        ("types", "--editable '.[test,dev]'"),
        ("bench", "--editable '.[bench]'"),
    ],
)
def test_a_target_installs_what_it_needs(target, installed, tmp_path):
    text = would_run(target, f"VENV={tmp_path / 'venv'}")
    assert f"{installed}\n" in text
    assert text.count(" -m pip install --quiet ") == 1
    assert "-m venv " in text


@pytest.mark.parametrize("target", ["demo", "setup", "test"])
def test_what_is_filled_is_not_filled_again(target, tmp_path):
    venv = tmp_path / "venv"
    for path in [venv / "bin" / "python", *stamps(would_run("setup", f"VENV={venv}"))]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert "pip install" not in would_run(target, f"VENV={venv}")


def test_what_the_demo_installed_is_not_all_that_tests_need(tmp_path):
    venv = tmp_path / "venv"
    for path in [venv / "bin" / "python", *stamps(would_run("demo", f"VENV={venv}"))]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert "pip install" not in would_run("demo", f"VENV={venv}")
    assert "'.[test,dev]'" in would_run("test", f"VENV={venv}")
    assert "'.[bench]'" in would_run("bench", f"VENV={venv}")


@pytest.mark.parametrize("target", ["demo", "setup"])
def test_the_way_to_the_command_is_said_last(target, tmp_path):
    last = would_run(target, f"VENV={tmp_path / 'venv'}").splitlines()[-1]
    assert f". {tmp_path / 'venv'}/bin/activate" in last


def test_nothing_is_installed_into_an_active_environment():
    text = would_run("demo", "PYTHON=python")
    assert "pip install" not in text
    assert "tools/check_environment.py" in text
    assert "activate" not in text
