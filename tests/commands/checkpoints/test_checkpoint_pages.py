"""What docs/checkpoints.md shows is what the commands print, and what it names exists.

The page's commands run in its order, in one folder, on the models that it speaks of; only how far
logits are apart, and losses, may differ from machine to machine.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
import sentencepiece
from support import hf_models
from support.tiny_run import SPARSE, run_command, trained

from megatron_switch.checkpoint.convert.architectures import model_types
from megatron_switch.cli import main
from megatron_switch.flags.train_flags import flag_names

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
SHOWN = re.compile(r"```text\n\$ (megatron-switch (?:.*\\\n)*.*)\n((?:.*\n)*?)```")
EXAMPLES = [(command.replace("\\\n", ""), output) for command, output in SHOWN.findall(PAGE)]
TRAINING = (
    f"{SPARSE} --mock-data --train-iters 3 --save-interval 3 --use-distributed-optimizer "
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --switch-run-dir"
)
"""What made ``runs/gpt``."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_command_prints_what_the_page_shows(tmp_path):
    make_models(tmp_path)
    for command, shown in EXAMPLES:
        assert outcome_of(command, tmp_path) == comparable(shown), command


def make_models(folder: Path) -> None:
    """Make what the page's commands start from."""
    experts = {"num_experts": 8, "expert_capacity": 64}
    hf_models.save(folder / "switch-base-like", "switch_transformers", **experts)
    hf_models.save(folder / "qwen2-like", "qwen2", vocab_size=200)
    (folder / "text.txt").write_bytes(Path(re.__file__).read_bytes())
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "qwen2-like" / "tokenizer"),
        vocab_size=200,
        minloglevel=2,
    )
    trained(f"{TRAINING} {folder / 'runs' / 'gpt'}", ranks=2)


def outcome_of(command: str, folder: Path) -> str:
    """Run a command in a folder; return what it says, of an error the message."""
    outcome = run_command(*shlex.split(command)[1:], prepare=lambda: os.chdir(folder))
    if outcome.code == 0:
        return comparable(outcome.screen)
    assert outcome.code == 2, outcome.errors
    return comparable(outcome.screen + outcome.errors[outcome.errors.index("megatron-switch:") :])


def comparable(text: str) -> str:
    """Return a text without line breaks and without what differs from machine to machine."""
    words = " ".join(text.split())
    words = re.sub(r"difference \S+ where the largest logit is \S+", "difference", words)
    return re.sub(r"[+-]?\d+\.\d{4}\b", "a loss", words)


def test_every_action_is_shown():
    shown = " ".join(command for command, _ in EXAMPLES)
    for action in ("hf-to-megatron", "megatron-to-hf", "inspect", "verify", "reshard", "upcycle"):
        assert f" {action} " in f"{shown} ", action


def test_every_architecture_that_the_page_names_can_be_converted():
    named = set(re.findall(r"`([a-z0-9]+(?:_[a-z]+)*)`", PAGE.split("Read are")[1].split(". ")[0]))
    assert named == {*model_types(), "t5"}


def test_every_flag_that_the_page_names_exists(capsys):
    seen = {f"--{name}" for name in flag_names()}
    actions = ["hf-to-megatron", "megatron-to-hf", "inspect", "verify"]
    for words in (
        *(["convert", action] for action in actions),
        ["reshard"],
        ["upcycle"],
        ["prepare"],
    ):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        seen |= set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", PAGE))
    assert named - seen == set()
