"""The tools of a checkout are the commands of the package."""

import runpy
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.parametrize(
    ("tool", "command"),
    [
        ("plan_layout.py", "plan"),
        ("check_binding.py", "check-binding"),
        ("from_deepspeed.py", "from-deepspeed"),
        ("rehearse.py", "rehearse"),
        ("render_launch.py", "render-launch"),
    ],
)
def test_a_tool_is_its_command(capsys, monkeypatch, tool, command):
    monkeypatch.setattr(sys, "argv", [tool, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(TOOLS / tool), run_name="__main__")
    assert f"usage: megatron-switch {command} " in capsys.readouterr().out
    assert len((TOOLS / tool).read_text().splitlines()) < 100
