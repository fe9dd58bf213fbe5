"""``convert verify`` accepts every correct conversion, and says what it did not compare.

Weights change in one step of training with a large learning rate, rows of padding included.
"""

from pathlib import Path

import pytest
from support import hf_models
from support.tiny_run import run_command

from megatron_switch.checkpoint.formats.hf_folder import read_json, write_json

pytestmark = pytest.mark.slow

TRAINING = (
    "--use-checkpoint-args --mock-data --train-iters 1 --lr 1e-1 --micro-batch-size 1 "
    "--eval-iters 0 --switch-device cpu --save-interval 1"
)


def succeeded(*words: str) -> str:
    outcome = run_command(*words)
    assert outcome.code == 0, outcome.screen + outcome.errors
    return " ".join(outcome.screen.split())


def trained(folder: Path, target: Path, *more: str) -> Path:
    succeeded("train", "--load", str(folder), "--save", str(target), *TRAINING.split(), *more)
    return target


def verified(hf: Path, megatron: Path, *more: str) -> str:
    return succeeded("convert", "verify", "--hf", str(hf), "--megatron", str(megatron), *more)


def exported(megatron: Path, hf: Path, *more: str) -> Path:
    succeeded("convert", "megatron-to-hf", "--megatron", str(megatron), "--hf", str(hf), *more)
    return hf


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    """A Llama that was upcycled and trained for a step."""
    folder = tmp_path_factory.mktemp("sparse")
    hf_models.save(folder / "hf", "llama")
    succeeded(
        *("upcycle", "--hf", str(folder / "hf"), "--save", str(folder / "new")),
        *("--num-experts", "4"),
    )
    return trained(folder / "new", folder / "trained", "--switch-eval-capacity-factor", "0.25")


def test_a_target_without_capacity_is_compared_without_drops(tmp_path, sparse):
    screen = verified(exported(sparse, tmp_path / "hf"), sparse)
    assert "all equal, bit for bit. Not compared: 5 rows of padding" in screen
    assert "qwen2_moe of transformers has no capacity, and Megatron's side was" in screen
    assert "% of these random tokens are dropped, which changes logits by up to" in screen


def test_a_model_type_without_a_class_is_compared_by_its_settings(tmp_path, sparse):
    hf = exported(sparse, tmp_path / "hf", "--architecture", "switch_gpt")
    assert "Settings: all equal. Logits are not compared: transformers has no" in verified(
        hf, sparse
    )
    config = read_json(hf / "config.json")
    config["routing"]["switch_eval_capacity_factor"] = 2.0
    config["rms_norm_eps"] = 0.5
    write_json(hf / "config.json", config)
    outcome = run_command("convert", "verify", "--hf", str(hf), "--megatron", str(sparse))
    message = " ".join(outcome.errors.split())
    assert outcome.code == 2
    assert "layernorm_epsilon is 0.5 in config.json and 1e-06 in Megatron's arguments" in message
    assert "switch_eval_capacity_factor is 2.0 in config.json and 0.25 in Megatron" in message


@pytest.mark.parametrize("capacity", ["the source's", "of a micro-batch"])
def test_a_t5_is_compared_with_the_capacity_of_the_target(tmp_path, capacity):
    hf_models.save(tmp_path / "hf", "switch_transformers")
    imported = ("--hf", str(tmp_path / "hf"), "--megatron", str(tmp_path / "m"))
    succeeded("convert", "hf-to-megatron", *imported)
    other = "--switch-override-checkpoint --switch-capacity-group microbatch --switch-capacity 5"
    more = other.split() if capacity == "of a micro-batch" else []
    megatron = trained(tmp_path / "m", tmp_path / "trained", *more)
    screen = verified(exported(megatron, tmp_path / "back"), megatron)
    assert ("slots per expert and sequence, and Megatron's side" in screen) == bool(more)


def test_rounded_weights_are_compared_as_rounded(tmp_path, sparse):
    hf = exported(sparse, tmp_path / "hf", "--dtype", "bf16")
    assert "after rounding" in verified(hf, sparse)


def test_an_older_iteration_is_compared_where_it_was_exported(tmp_path):
    hf_models.save(tmp_path / "hf", "llama")
    imported = ("--hf", str(tmp_path / "hf"), "--megatron", str(tmp_path / "m"))
    succeeded("convert", "hf-to-megatron", *imported)
    run = trained(tmp_path / "m", tmp_path / "run", "--train-iters", "2")
    hf = exported(run, tmp_path / "back", "--iteration", "1")
    assert "all equal, bit for bit" in verified(hf, run, "--iteration", "1")
    outcome = run_command("convert", "verify", "--hf", str(hf), "--megatron", str(run))
    assert outcome.code == 2
    assert "differs from" in outcome.errors
