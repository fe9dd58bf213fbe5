"""What the README says is true: commands exist, links lead somewhere, the log line is real."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_switch.commands.table import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMMAND_LINES = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


def test_there_are_commands_to_check():
    assert len(COMMAND_LINES) >= 6


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_every_command_exists(line):
    words = [word for word in shlex.split(line) if not re.fullmatch(r"[A-Z_]+=.*", word)]
    program, *rest = words
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif program == "megatron-switch":
        assert rest[0] in COMMANDS
    elif program == ".":
        assert rest == [".venv/bin/activate"]
    elif program == "pip":
        ((package, extra),) = re.findall(r"^install (\.)(?:\[(\w+)\])?$", " ".join(rest))
        assert package == "."
        assert not extra or extra in EXTRAS
    else:
        assert (ROOT / program).is_file()
        assert (ROOT / program).stat().st_mode & 0o111, f"{program} is not executable"


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_every_link_leads_somewhere(target):
    assert target.startswith("https://arxiv.org/") or (ROOT / target).exists()


def test_the_log_line_has_every_value_that_is_explained():
    (line,) = re.findall(r"```text\n(.*?)```", README, flags=re.DOTALL)
    explained = re.findall(r"^\| `([^`]+)` \|", README, flags=re.MULTILINE)
    assert len(explained) >= 7
    for name in explained:
        assert re.search(rf"\| {re.escape(name)}: [0-9.]", " ".join(line.split())), name


def test_flags_that_the_readme_names_exist():
    known = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    for flag in set(re.findall(r"`?(--switch-[a-z-]+)", README)) - {"--switch-"}:
        assert f"`{flag}`" in known, flag


def test_what_is_looked_at_is_where_the_example_before_it_trains():
    loads = re.findall(r"--load (runs/[\w/-]+)", README) + re.findall(r"sweep (runs/\S+)", README)
    examples = [path.read_text() for path in (ROOT / "examples").glob("*.sh")]
    for load in set(loads):
        assert any(f"RUN:-{load.removesuffix('/run')}}}" in text for text in examples), load


def test_how_to_enter_the_environment_is_said_before_its_command_is_used():
    first_use = next(n for n, line in enumerate(COMMAND_LINES) if "megatron-switch" in line)
    assert ". .venv/bin/activate" in COMMAND_LINES[:first_use]


@pytest.mark.slow
def test_the_layer_runs_as_a_library():
    (program,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    program += "\nassert y_SBD.shape == (16, 2, 64) and y_SBD.abs().sum() > 0\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
