"""Every example script runs as it is, on CPU ranks, with flags that make the model small."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_switch.commands.train import EXAMPLE

ROOT = Path(__file__).parents[1]
SMALL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--micro-batch-size",
    "1",
    "--train-iters",
    "3",
    "--eval-interval",
    "3",
    "--eval-iters",
    "1",
    "--lr-warmup-iters",
    "0",
    "--log-interval",
    "1",
    "--switch-device",
    "cpu",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(120):
        words = " ".join(f"word{(number * n) % 97} is number {n}." for n in range(60))
        (folder / f"{number:02}.txt").write_text(words)
    return folder


@pytest.fixture(scope="module")
def corpus(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    command("prepare", str(text), "--vocab-size", "300", "--output", str(folder / "data"))
    return {
        "DATA": str(folder / "data" / "corpus"),
        "TOKENIZER": str(folder / "data" / "tokenizer.model"),
    }


def command(*words):
    return subprocess.run(
        [sys.executable, "-m", "megatron_switch", *words],
        check=True,
        capture_output=True,
        text=True,
    )


def run_example(name, *words, **variables):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **variables,
    }
    result = subprocess.run(
        ["bash", str(ROOT / "examples" / name), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def losses(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["lm_loss"] for record in records if record["kind"] == "train"]


def test_every_example_is_tested():
    tested = {"cpu_4_ranks.sh", "gpt_one_gpu.sh", "gpt_one_node.sh", "t5_finetune.sh"}
    assert {path.name for path in (ROOT / "examples").glob("*.sh")} == tested


def test_cpu_4_ranks(text, tmp_path):
    small = [*SMALL, "--global-batch-size", "4", "--train-iters", "3"]
    output = run_example(
        "cpu_4_ranks.sh", *small, TEXT=str(text), VOCAB_SIZE="300", RUN=str(tmp_path)
    )
    assert "8 experts over EP 2" in output
    assert len(losses(tmp_path / "run")) == 3


def test_one_gpu_and_the_sample_of_the_readme(corpus, tmp_path):
    small = [*SMALL, "--global-batch-size", "2"]
    run_example("gpt_one_gpu.sh", "8", *small, RUN=str(tmp_path / "run"), **corpus)
    first = losses(tmp_path / "run")
    assert len(first) == 3
    # The same command again continues: there is nothing left to do, and nothing is lost.
    run_example("gpt_one_gpu.sh", "8", *small, RUN=str(tmp_path / "run"), **corpus)
    assert losses(tmp_path / "run") == first
    prompt = "word1 is"
    sample = command(
        "generate", "--load", str(tmp_path / "run"), "--prompt", prompt, "--num-tokens", "3"
    )
    assert sample.stdout.startswith(prompt)
    table = command("experts", "--load", str(tmp_path / "run"), "--min-count", "2").stdout
    assert len(re.findall(r" \d+\.\d% ", table)) == 8  # a share for each expert
    assert "the last sparse one" in " ".join(table.split())


def test_the_command_that_the_help_of_train_shows(corpus):
    line = EXAMPLE.replace("\\\n", "").replace("corpus/corpus", corpus["DATA"])
    program, *words = shlex.split(line)
    words[words.index("--tokenizer-model") + 1] = corpus["TOKENIZER"]
    assert program == "megatron-switch"
    output = command(*words, *SMALL, "--split", "98,1,1").stdout
    assert re.search(r"iteration +3/ +3 .* dropped: ", output)


def test_one_gpu_of_24_gb_as_in_the_readme(corpus, tmp_path):
    small = [*SMALL, "--global-batch-size", "2"]
    output = run_example("gpt_one_gpu.sh", "24", *small, RUN=str(tmp_path), **corpus)
    assert "layers bf16, router fp32" in output
    assert len(losses(tmp_path)) == 3


def test_one_gpu_says_which_sizes_there_are(corpus):
    with pytest.raises(AssertionError, match=r"usage: .*gpt_one_gpu.sh 8\|24"):
        run_example("gpt_one_gpu.sh", "16", **corpus)


@pytest.mark.parametrize("name", ["gpt_one_gpu.sh", "gpt_one_node.sh", "t5_finetune.sh"])
@pytest.mark.parametrize("missing", ["DATA", "TOKENIZER"])
def test_an_example_says_what_it_needs(name, missing, corpus):
    given = {**corpus, missing: ""}
    with pytest.raises(AssertionError, match=rf"{missing}: set .* as in {missing}="):
        run_example(name, **given)


def test_one_node_of_eight(corpus, tmp_path):
    output = run_example(
        "gpt_one_node.sh",
        *SMALL,
        "--global-batch-size",
        "8",
        LAUNCH="megatron-switch launch-local -n 8",
        RUN=str(tmp_path),
        **corpus,
    )
    assert "64 experts over EP 8, 8 on a rank" in output
    assert len(losses(tmp_path)) == 3


def test_t5_finetune_from_nothing_then_from_its_checkpoint_and_what_it_answers(corpus, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    lines = [
        json.dumps({"input": f"after {number}", "target": f"word{number + 1}"})
        for number in range(40)
    ]
    pairs.write_text("\n".join(lines))
    small = [*SMALL, "--ffn-hidden-size", "64", "--kv-channels", "16", "--global-batch-size", "2"]
    small += ["--decoder-seq-length", "16"]
    first, second = tmp_path / "first", tmp_path / "second"
    given = {"DATA": str(pairs), "TOKENIZER": corpus["TOKENIZER"]}
    output = run_example("t5_finetune.sh", *small, RUN=str(first), **given)
    assert "expert dropout 0.4" in output
    assert len(losses(first)) == 3
    more = ["--train-iters", "2", "--lr-warmup-iters", "0", "--switch-device", "cpu"]
    more += ["--micro-batch-size", "1", "--global-batch-size", "2", "--decoder-seq-length", "16"]
    more += ["--log-interval", "1", "--eval-iters", "0"]
    load = {"DATA": str(pairs), "LOAD": str(first / "checkpoints")}
    output = run_example("t5_finetune.sh", *more, RUN=str(second), **load)
    assert "encoder of 2 layers (sparse 2; dense 1)" in output
    assert len(losses(second)) == 2
    answer = command(
        "generate", "--load", str(second), "--prompt", "after 3", "--greedy", "--num-tokens", "3"
    )
    assert "after 3" not in answer.stdout
    assert answer.stdout.endswith("\n")
