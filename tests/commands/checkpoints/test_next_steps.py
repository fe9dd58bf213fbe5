"""The printed commands work as they are, and ask for no more memory than is usual."""

import re
import shlex
from argparse import Namespace
from pathlib import Path

import pytest
import sentencepiece
from support import hf_models
from support.tiny_run import run_command

from megatron_switch.commands.checkpoints.next_steps import capacity_text, next_steps

ARGS = Namespace(
    switch_arch="gpt",
    tokenizer_type="HuggingFaceTokenizer",
    tokenizer_model="/there/a b",
    vocab_size=99,
    seq_length=512,
    num_experts=None,
)


def args_with(**changes):
    return Namespace(**{**vars(ARGS), **changes})


def test_data_are_made_with_the_models_tokenizer():
    first, prepare, train = next_steps(ARGS, Path("m"), {}).splitlines()
    assert "TEXTS" in first
    assert prepare == (
        "megatron-switch prepare TEXTS --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
        "'/there/a b' --output m-corpus"
    )
    assert "--data-path m-corpus/corpus" in train
    assert "--seq-length" not in train


def test_a_long_context_is_no_reason_for_long_sequences():
    text = next_steps(args_with(seq_length=131072), Path("m"), {})
    assert "--micro-batch-size 2 " in text
    assert "--seq-length 4096\nThe model reads up to 131,072 tokens, and --seq-length may" in text


def test_a_t5_without_a_tokenizer_trains_on_pairs():
    args = args_with(switch_arch="t5", tokenizer_type="NullTokenizer", tokenizer_model=None)
    text = next_steps(args, Path("m"), {})
    assert "prepare" not in text
    assert "--data-path PAIRS.jsonl" in text


def test_the_command_shows_the_capacity_of_the_other_side():
    flags = {"switch-capacity": 64, "switch-capacity-group": "sequence", "num-layers": 2}
    command = next_steps(ARGS, Path("there"), flags).splitlines()[-1]
    assert command.endswith("--switch-capacity 64 --switch-capacity-group sequence")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["convert", "upcycle"])
@pytest.mark.parametrize("tokenizer", ["tokenizer.model", "none"])
def test_what_is_printed_is_done(tmp_path, command, tokenizer):
    hf, new, text = (tmp_path / name for name in ("hf folder", "new", "texts"))
    hf_models.save(hf, "llama", vocab_size=200, max_position_embeddings=8192)
    text.mkdir()
    (text / "a.txt").write_text(" ".join("123" * 2000))
    if tokenizer != "none":
        sentencepiece.SentencePieceTrainer.train(
            input=re.__file__, model_prefix=str(hf / "tokenizer"), vocab_size=200, minloglevel=2
        )
    words = ["convert", "hf-to-megatron", "--hf", str(hf), "--megatron", str(new)]
    if command == "upcycle":
        words = ["upcycle", "--hf", str(hf), "--save", str(new), "--num-experts", "2"]
    screen = run_command(*words).screen
    lines = [line for line in screen.splitlines() if line.startswith("megatron-switch ")]
    assert len(lines) == 2, screen
    short = "--train-iters 1 --eval-iters 0 --switch-device cpu --seq-length 64"
    for line, more in zip(lines, ["--workers 1", short], strict=True):
        outcome = run_command(*shlex.split(line.replace("TEXTS", str(text)))[1:], *more.split())
        assert outcome.code == 0, line + outcome.screen + outcome.errors


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            {"switch-capacity": 64, "switch-capacity-group": "sequence"},
            "Capacity: an expert takes at most 64 tokens of one sequence; a larger "
            "--micro-batch-size drops no more, a longer --seq-length does, and with "
            "--switch-capacity-group microbatch all sequences would share them.",
        ),
        (
            {"switch-capacity": 64},
            "Capacity: an expert takes at most 64 tokens of one micro-batch, all its sequences "
            "together; a larger --micro-batch-size drops more.",
        ),
        (
            {"moe-expert-capacity-factor": 1.25},
            "Capacity: an expert takes at most --moe-expert-capacity-factor times its even share "
            "of a micro-batch's tokens, which grows with --micro-batch-size, and a larger one "
            "drops fewer.",
        ),
        (
            {"moe-expert-capacity-factor": 1.25, "switch-capacity-group": "sequence"},
            "Capacity: an expert takes at most --moe-expert-capacity-factor times its even share "
            "of a sequence's tokens, which does not depend on --micro-batch-size.",
        ),
        (
            {"moe-expert-capacity-factor": -1.0},
            "Capacity: none, so no token is dropped, whatever --micro-batch-size is.",
        ),
    ],
    ids=str,
)
def test_what_the_capacity_is_of_stands_below_the_command(flags, text):
    assert capacity_text(flags) == text
