"""The tools of a checkout that are commands of the package, under another name."""

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
COMMAND_OF = {
    "check_binding.py": "check-binding",
    "check_layouts.py": "check-layouts",
    "convert_checkpoint.py": "convert",
    "from_deepspeed.py": "from-deepspeed",
    "plan_layout.py": "plan",
    "rehearse.py": "rehearse",
    "render_launch.py": "render-launch",
    "reshard_checkpoint.py": "reshard",
    "upcycle_dense.py": "upcycle",
}


@pytest.mark.parametrize("tool", COMMAND_OF)
def test_a_tool_is_its_command(capsys, monkeypatch, tool):
    monkeypatch.setattr(sys, "argv", [tool, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(TOOLS / tool), run_name="__main__")
    assert f"usage: megatron-switch {COMMAND_OF[tool]} " in capsys.readouterr().out


def test_these_tools_do_nothing_else():
    body = """

import sys

from megatron_switch.cli import main

if __name__ == "__main__":
    sys.exit(main(["{}", *sys.argv[1:]]))
"""
    for tool, command in COMMAND_OF.items():
        text = (TOOLS / tool).read_text(encoding="utf-8")
        assert text == f'"""The command ``megatron-switch {command}`` of this checkout."""' + (
            body.format(command)
        )
