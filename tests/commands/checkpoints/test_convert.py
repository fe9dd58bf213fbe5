"""The commands, end to end: what they print, and that what they write can be used."""

import multiprocessing
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support import hf_models
from support.tiny_run import run_command

from megatron_switch.checkpoint.formats.hf_folder import read_json, write_json
from megatron_switch.cli import main
from megatron_switch.training.inference.token_scores import scores

pytestmark = pytest.mark.slow


def succeeded(*words: str) -> str:
    """Run a command that shows what it says, its bar of progress, and nothing of libraries."""
    outcome = run_command(*words, prepare=show_warnings)
    assert outcome.code == 0, outcome.screen + outcome.errors
    assert "Warning" not in outcome.errors
    assert "Loading weights" not in outcome.errors
    return outcome.screen


def show_warnings() -> None:
    """Show warnings as a process does that no test has started."""

    def show(message, category, filename, lineno, file=None, line=None):
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    warnings.showwarning = show
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning):
        warnings.simplefilter("ignore", category)


@pytest.mark.parametrize("model_type", ["switch_transformers", "qwen2_moe", "llama"])
def test_there_verified_and_back(tmp_path, model_type):
    hf, megatron, back = (str(tmp_path / name) for name in ("hf", "megatron", "back"))
    hf_models.save(hf, model_type)
    screen = succeeded("convert", "hf-to-megatron", "--hf", hf, "--megatron", megatron)
    assert "5 vocabulary rows of padding" in screen
    assert f"--load {megatron} --use-checkpoint-args" in screen
    assert ("Capacity: " in screen) == (model_type != "llama")
    screen = succeeded("convert", "verify", "--hf", hf, "--megatron", megatron)
    assert "all equal, bit for bit" in screen
    assert "largest difference" in screen
    succeeded("convert", "megatron-to-hf", "--megatron", megatron, "--hf", back)
    assert read_json(Path(back) / "config.json")["vocab_size"] == 99
    screen = succeeded("convert", "verify", "--tensors-only", "--hf", back, "--megatron", megatron)
    assert "Logits" not in screen


def test_a_setting_that_differs_shows_in_the_logits(tmp_path):
    hf, megatron = str(tmp_path / "hf"), str(tmp_path / "megatron")
    hf_models.save(hf, "llama")
    succeeded("convert", "hf-to-megatron", "--hf", hf, "--megatron", megatron)
    config = read_json(tmp_path / "hf" / "config.json")
    config["rope_parameters"]["rope_theta"] = 100.0
    write_json(tmp_path / "hf" / "config.json", config)
    outcome = run_command("convert", "verify", "--hf", hf, "--megatron", megatron)
    assert outcome.code == 2
    assert "all equal, bit for bit" in outcome.screen
    assert "The two sides compute different logits" in outcome.errors


def test_an_error_is_a_message_and_an_exit_code(tmp_path, capsys):
    assert main(["convert", "inspect", str(tmp_path / "absent")]) == 2
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["t5", "llama"])
def test_upcycling_keeps_the_function_at_a_uniform_router(tmp_path, model_type):
    """ReLU and a gated unit, zero router, no drops: the logits are the dense model's."""
    dense = hf_models.save(tmp_path / "hf", model_type)
    hf, new = str(tmp_path / "hf"), str(tmp_path / "new")
    flags = ("--num-experts", "4", "--scale", "sqrt_e", "--router-scale", "0")
    screen = succeeded("upcycle", "--hf", hf, "--save", new, *flags)
    assert f"4 experts in {3 if model_type == 't5' else 2} layers" in screen
    tokens_BS = torch.randint(0, 99, (2, 12))
    targets_BS = tokens_BS[:, :5] if model_type == "t5" else None
    more = {} if targets_BS is None else {"decoder_input_ids": targets_BS}
    with torch.no_grad():
        expected_BSV = dense(tokens_BS, **more).logits
    # In a process of its own: one that had process groups cannot fork others' ranks.
    child = multiprocessing.get_context("fork").Process(
        target=_check_scores, args=(Path(new), tokens_BS, targets_BS, expected_BSV)
    )
    child.start()
    child.join()
    assert child.exitcode == 0
    outcome = run_command("upcycle", "--hf", hf, "--save", new, *flags)
    assert outcome.code == 2
    assert "already exists" in outcome.errors


def _check_scores(folder, tokens_BS, targets_BS, expected_BSV):
    found_BSV = scores(folder, tokens_BS, targets_BS, drop=False)[..., :99]
    torch.testing.assert_close(found_BSV, expected_BSV, rtol=1e-5, atol=1e-5)


def test_resharding_refuses_a_layout_that_is_none(tmp_path):
    hf, megatron = str(tmp_path / "hf"), str(tmp_path / "megatron")
    hf_models.save(hf, "qwen2_moe")
    succeeded("convert", "hf-to-megatron", "--hf", hf, "--megatron", megatron)
    new = str(tmp_path / "new")
    outcome = run_command(
        "reshard", "--load", megatron, "--save", new, "--expert-model-parallel-size", "3"
    )
    assert outcome.code == 2
    assert "--expert-model-parallel-size" in outcome.errors
    assert not Path(new).exists()
    screen = succeeded(
        *("reshard", "--load", megatron, "--save", new),
        *("--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"),
    )
    assert "read back and equal. TP 1 -> 2" in screen
