"""Text from a checkpoint of four ranks, on one rank and on two, against plain forward passes."""

import io
from pathlib import Path

import pytest
import torch

from megatron_switch.cli import main
from megatron_switch.emulation import launch
from megatron_switch.errors import CheckpointError, ConfigError, DataError
from megatron_switch.training.generation import run, text_pieces
from megatron_switch.training.trained_model import open_trained_model

PROMPT = "def f3(a, b):"
CONTEXT = 32
ON_CPU = ("--switch-device", "cpu")
MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length 32 --max-position-embeddings 32 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --switch-device cpu
    --micro-batch-size 4 --global-batch-size 8 --lr 3e-2 --eval-iters 0 --eval-interval 1000
    --split 100,0,0
""".split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train on four ranks, with sparse layers where no default puts them; return the run folder."""
    folder = tmp_path_factory.mktemp("trained")
    text = "".join(
        f"def f{n}(a, b):\n    return a + b * {n}  # the sum, scaled by {n}\n\n\n" for n in range(80)
    )
    (folder / "text.py").write_text(text)
    data = ["prepare", str(folder / "text.py"), "--output", str(folder / "data")]
    assert main([*data, "--vocab-size", "300", "--workers", "1"]) == 0
    flags = [
        *MODEL,
        *("--data-path", str(folder / "data" / "corpus")),
        *("--tokenizer-type", "SentencePieceTokenizer"),
        *("--tokenizer-model", str(folder / "data" / "tokenizer.model")),
        *("--num-experts", "4", "--moe-layer-freq", "[1,0]", "--train-iters", "30"),
        *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--expert-model-parallel-size", "2", "--use-distributed-optimizer"),
        *("--switch-run-dir", str(folder / "run")),
    ]
    assert launch(4, lambda: main(["train", *flags])) == 0
    return folder / "run"


def generate(capsys, folder, *flags):
    """Return what ``generate`` prints of a prompt on one rank."""
    assert run(["--load", str(folder), *ON_CPU, *flags]) == 0
    return capsys.readouterr().out


def window(ids):
    tokens_BS = torch.tensor([ids])
    return tokens_BS, torch.zeros_like(tokens_BS, dtype=torch.bool)


def test_greedy_text_is_the_argmax_of_plain_forward_passes(trained, capsys):
    with open_trained_model(trained, ON_CPU) as model:
        tokenizer = model.tokenizer
        prompt_ids = tokenizer.built.tokenize(PROMPT)
        ids = list(prompt_ids)
        for _ in range(30):  # longer than the context
            logits_BSV = model.logits(*window(ids[-CONTEXT:]))
            ids.append(int(logits_BSV[0, -1, : tokenizer.vocab_size].argmax()))
        assert tokenizer.eod not in ids
        expected = tokenizer.built.detokenize(ids)
    assert expected.startswith(PROMPT)
    greedy = ("--greedy", "--num-tokens", "30")
    assert generate(capsys, trained, "--prompt", PROMPT, *greedy) == expected + "\n"
