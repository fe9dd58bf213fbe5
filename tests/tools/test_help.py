"""Whoever asks a tool or an example what it does gets an answer, and nothing is done."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted((ROOT / "tools").glob("*.py"))
SCRIPTS = sorted([*(ROOT / "tools").glob("*.sh"), *(ROOT / "examples").glob("*.sh")])
WRITTEN = ("constraints.txt", "docs/flags.md", "megatron_switch/flags/train_flags.json")
"""What tools write in a checkout."""


def state():
    """Return when each of these files was written."""
    return {name: (ROOT / name).stat().st_mtime_ns for name in WRITTEN}


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.name)
def test_a_tool_answers_help_and_does_nothing(capsys, monkeypatch, tool):
    before = state()
    monkeypatch.setattr(sys, "argv", [tool.name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(tool), run_name="__main__")
    assert "usage: " in capsys.readouterr().out
    assert state() == before


@pytest.mark.parametrize("tool", ["lock_versions.py", "make_flags_doc.py"])
def test_a_tool_refuses_what_it_does_not_know(capsys, monkeypatch, tool):
    before = state()
    monkeypatch.setattr(sys, "argv", [tool, "--what"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")
    assert "unrecognized arguments: --what" in capsys.readouterr().err
    assert state() == before


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_answers_help_and_does_nothing(tmp_path, script, flag):
    run = subprocess.run(
        ["bash", script, flag],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert script.name in run.stdout
    assert "set -e" not in run.stdout
    assert list(tmp_path.iterdir()) == []
