"""Every example script runs as it is, on CPU ranks, with flags that make the model small."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    tested = {"cpu_4_ranks.sh", "gpt_one_gpu.sh", "gpt_one_node.sh"}
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
    assert table.count("%") == 8


def test_one_gpu_says_which_sizes_there_are(corpus):
    with pytest.raises(AssertionError, match=r"usage: .*gpt_one_gpu.sh 8\|24"):
        run_example("gpt_one_gpu.sh", "16", **corpus)


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
