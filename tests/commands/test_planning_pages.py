"""What the planning pages show is what the commands print, and the flags they name exist."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_switch.cli import main
from megatron_switch.commands.table import COMMANDS
from megatron_switch.flags.train_flags import flag_names

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHOWN = re.compile(r"```text\n\$ megatron-switch ((?:plan|render-launch) .*)\n((?:.*\n)*?)```")
EXAMPLES = SHOWN.findall((DOCS / "scaling.md").read_text(encoding="utf-8"))
PAGES = ("scaling.md", "troubleshooting.md", "tutorial_map.md")
FOREIGN = {
    # of other programs, or of DeepSpeed
    "--expert_parallel_size",
    "--ntasks-per-node",
    "--distribution",
}


@pytest.mark.parametrize(("command", "expected"), EXAMPLES, ids=[words for words, _ in EXAMPLES])
def test_what_is_shown_is_what_is_printed(capsys, monkeypatch, tmp_path, command, expected):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.strip().splitlines()] == expected.strip().splitlines()


def test_there_are_examples_of_each_kind():
    text = " ".join(command for command, _ in EXAMPLES)
    for option in ("render-launch", "--explain", "--grid", "--sweep-capacity", " -- "):
        assert option in text


def test_every_flag_that_a_page_names_exists(capsys):
    known = {f"--{name}" for name in flag_names()} | FOREIGN
    for command in ("plan", "rehearse", "check-binding", "from-deepspeed", "render-launch"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known |= set(re.findall(r"--[a-z][a-z0-9_-]*", capsys.readouterr().out))
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", text))
        assert named - known == set(), page


def test_every_command_that_a_page_names_exists():
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        assert set(re.findall(r"`megatron-switch ([a-z-]+)", text)) <= set(COMMANDS), page
