"""Bad configurations from the command line: file, key, expected and found; nothing is written."""

import json
from pathlib import Path

import pytest
from support import hf_models

from megatron_switch.cli import main


def change(folder: Path, changes: dict[str, object]) -> None:
    """Change the configuration of a folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture
def llama(tmp_path, monkeypatch) -> Path:
    """A folder with a small Llama, relative to the current one."""
    monkeypatch.chdir(tmp_path)
    hf_models.save(tmp_path / "hf", "llama")
    return Path("hf")


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        (
            "qwen2_moe",
            {"num_experts": "four"},
            ["'num_experts': expected", 'found "four"', "0 or more"],
        ),
        (
            "qwen2_moe",
            {"decoder_sparse_step": 0},
            ["'decoder_sparse_step': expected", "found 0", "1 or more"],
        ),
        (
            "qwen2_moe",
            {"mlp_only_layers": 1},
            ["'mlp_only_layers': expected", "found 1", "numbers from 0 to 3"],
        ),
        ("qwen2_moe", {"mlp_only_layers": [4]}, ["'mlp_only_layers': expected", "found [4]"]),
        (
            "qwen2_moe",
            {"moe_intermediate_size": -1},
            ["'moe_intermediate_size': expected", "found -1"],
        ),
        (
            "switch_transformers",
            {"num_experts": 0},
            ["'num_experts': expected", "found 0", "1 or more"],
        ),
        (
            "switch_transformers",
            {"expert_capacity": "64"},
            ["'expert_capacity': expected", 'found "64"'],
        ),
        (
            "switch_transformers",
            {"encoder_sparse_step": [2]},
            ["'encoder_sparse_step': expected", "found [2]"],
        ),
        (
            "switch_transformers",
            {"dropout_rate": 1.5},
            ["'dropout_rate': expected", "found 1.5", "below 1"],
        ),
        (
            "switch_transformers",
            {"layer_norm_epsilon": 0},
            ["'layer_norm_epsilon': expected", "found 0"],
        ),
        (
            "switch_transformers",
            {"router_aux_loss_coef": "a"},
            ["'router_aux_loss_coef': expected", 'found "a"'],
        ),
        (
            "switch_transformers",
            {"num_decoder_layers": 1.5},
            ["'num_decoder_layers': expected", "found 1.5"],
        ),
    ],
)
def test_settings_of_experts_are_held_to_the_format(
    tmp_path, monkeypatch, capsys, model_type, changes, words
):
    monkeypatch.chdir(tmp_path)
    hf_models.save(tmp_path / "hf", model_type)
    change(Path("hf"), changes)
    assert main(["convert", "hf-to-megatron", "--hf", "hf", "--megatron", "new"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert [word for word in ["hf/config.json, key ", *words] if word not in message] == [], message
    assert not Path("new").exists()


@pytest.mark.parametrize("value", ["x", 1.5, [1, "a"], {"a": 1}, True])
def test_tokens_that_are_no_ids_are_refused(llama, capsys, value):
    change(llama, {"eos_token_id": value})
    assert main(["convert", "hf-to-megatron", "--hf", "hf", "--megatron", "new"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "key 'eos_token_id': expected the id of a token, a list of ids, or null" in message
    assert not Path("new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"initializer_range": "x"}, {"id2label": 5}])
def test_what_transformers_cannot_open_is_said(llama, capsys, changes):
    assert main(["convert", "hf-to-megatron", "--hf", "hf", "--megatron", "m"]) == 0
    capsys.readouterr()
    change(llama, changes)
    assert main(["convert", "verify", "--hf", "hf", "--megatron", "m"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "transformers cannot open hf: " in message
    assert "Correct hf/config.json, or compare tensors only, with --tensors-only." in message
