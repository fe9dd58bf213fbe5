"""Bad input from the command line: one message that names file, key, expected and found.

Nothing is written, whichever command reads it.
"""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import hf_models

from megatron_switch.cli import main
from megatron_switch.testing.checkpoints import save_checkpoint

Q = "model.layers.1.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Return what changes the tensors of a folder."""

    def damage(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS, {"format": "pt"})

    return damage


def settings(**changes: object) -> Callable[[Path], None]:
    """Return what changes the configuration of a folder."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return damage


def cut(length: int) -> Callable[[Path], None]:
    """Return what shortens the file of weights; a negative length counts from its end."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:length])

    return damage


def in_files(folder: Path) -> None:
    """Put the weights into two files with an index."""
    found = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(found)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({key: found[key] for key in keys}, folder / file)
    weight_map = {key: file for file, keys in parts.items() for key in keys}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def without_a_file(folder: Path) -> None:
    in_files(folder)
    (folder / "b.safetensors").unlink()


def with_a_wrong_index(folder: Path) -> None:
    in_files(folder)
    text = (folder / f"{WEIGHTS}.index.json").read_text()
    (folder / f"{WEIGHTS}.index.json").write_text(text.replace(Q, f"{Q}s"))


@pytest.fixture
def llama(tmp_path, monkeypatch) -> Path:
    """A folder with a small Llama, relative to the current one."""
    monkeypatch.chdir(tmp_path)
    hf_models.save(tmp_path / "hf", "llama")
    return Path("hf")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_a_file, ["hf/model.safetensors.index.json", "1 are missing: b.safetensors"]),
        (with_a_wrong_index, ["index.json names", f"not in those files: {Q}s"]),
        (cut(-1000), [f"hf/{WEIGHTS} is no safetensors file", "cut off", "Copy it again"]),
        (cut(100), [f"hf/{WEIGHTS} is no safetensors file", "invalid header length"]),
        (tensors(lambda t: t.update({Q: t[Q].to(torch.int8)})), [WEIGHTS, Q, "int8", "float32"]),
        (tensors(lambda t: t.update({Q: t[Q].double()})), [WEIGHTS, Q, "torch.float64"]),
        (tensors(lambda t: t.update({Q: t[Q][1:].clone()})), [WEIGHTS, Q, "(31, 32)", "(32, 32)"]),
        (tensors(lambda t: t[Q][3].fill_(float("nan"))), [WEIGHTS, Q, "32 elements", "of 1024"]),
        (tensors(lambda t: t.pop(Q)), ["hf does not hold", f"lacks {Q}"]),
        (tensors(lambda t: t.update(more=torch.ones(1))), ["hf does not", "of the model are more"]),
        (
            settings(num_attention_heads=5, num_key_value_heads=5, head_dim=None),
            ["q_proj.weight", "(32, 32)", "(30, 32)"],
        ),
        (settings(num_key_value_heads=4), [WEIGHTS, "k_proj.weight", "(16, 32)", "(32, 32)"]),
        (
            settings(num_key_value_heads=3),
            ["'num_key_value_heads': expected", "found 3", "a divisor of its 4 heads"],
        ),
        (settings(num_hidden_layers=5), ["lacks model.layers.4."]),
        (settings(vocab_size=128), [WEIGHTS, "embed_tokens.weight", "(99, 32)", "(128, 32)"]),
        (settings(tie_word_embeddings=True), ["lm_head.weight differs from model.embed_tokens"]),
        (settings(num_hidden_layers="4"), ["'num_hidden_layers': expected", 'found "4"', "whole"]),
        (settings(vocab_size=[99]), ["'vocab_size': expected", "found [99]", "1 or more"]),
        (settings(hidden_size=0), ["'hidden_size': expected", "found 0"]),
        (settings(max_position_embeddings=-1), ["'max_position_embeddings': expected", "found -1"]),
        (
            settings(rms_norm_eps="tiny"),
            ["'rms_norm_eps': expected", 'found "tiny"', "a finite number, above 0"],
        ),
        (
            settings(tie_word_embeddings="no"),
            ["'tie_word_embeddings': expected", 'found "no"', "true or false"],
        ),
        (settings(rope_parameters=[1]), ["'rope_parameters': expected", "found [1]", "an object"]),
        (
            settings(rope_parameters={"rope_theta": "x"}),
            ["config.json, key 'rope_parameters.rope_theta': expected"],
        ),
        (settings(model_type=["llama"]), ["config.json", "of type ['llama']"]),
        (settings(model_type="mamba"), ["config.json", "'mamba'", "switch_transformers"]),
        (lambda folder: (folder / "config.json").write_text("[" * 99_999), ["cannot be read"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json cannot be read"]),
        (lambda folder: (folder / "config.json").unlink(), ["config.json is missing"]),
        (lambda folder: Path("new").mkdir(), ["--megatron new already exists"]),
    ],
)
def test_what_cannot_be_converted_is_named(llama, capsys, damage, words):
    damage(llama)
    before = sorted(Path().rglob("*"))
    assert main(["convert", "hf-to-megatron", "--hf", str(llama), "--megatron", "new"]) == 2
    message = " ".join(capsys.readouterr().err.split("megatron-switch: error:")[1].split())
    assert [word for word in words if word not in message] == [], message
    assert sorted(Path().rglob("*")) == before


@pytest.fixture
def megatron(llama, capsys) -> Path:
    """The same Llama as a Megatron checkpoint."""
    assert main(["convert", "hf-to-megatron", "--hf", str(llama), "--megatron", "m"]) == 0
    capsys.readouterr()
    return Path("m")


READERS = {
    "megatron-to-hf": "convert megatron-to-hf --megatron m --hf new",
    "verify": "convert verify --tensors-only --megatron m --hf hf",
    "reshard": "reshard --load m --save new",
    "upcycle": "upcycle --load m --save new --num-experts 4",
}


def truncated(release: Path) -> None:
    path = release / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-4000])


def overwritten(release: Path) -> None:
    path = release / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, ["m/release/__0_0.distcp has", "but the index needs"]),
        (lambda release: (release / "__0_0.distcp").unlink(), ["__0_0.distcp is missing"]),
        (lambda release: (release / ".metadata").write_bytes(b"no"), [".metadata cannot be read"]),
        (overwritten, ["m/release/__0_0.distcp: embedding.word_embeddings.weight", "(104, 32)"]),
    ],
)
def test_a_damaged_checkpoint_is_named_by_every_command(megatron, capsys, command, damage, words):
    damage(megatron / "release")
    before = sorted(Path().rglob("*"))
    assert main(READERS[command].split()) == 2
    message = " ".join(capsys.readouterr().err.split("megatron-switch: error:")[1].split())
    assert [word for word in words if word not in message] == [], message
    assert "start from new weights" not in message
    assert sorted(Path().rglob("*")) == before


def test_a_folder_of_another_format_names_the_flag(llama, capsys):
    assert main(["convert", "megatron-to-hf", "--megatron", str(llama), "--hf", "new"]) == 2
    assert "Hugging Face's format" in (message := " ".join(capsys.readouterr().err.split()))
    assert "Or correct --megatron" in message


def test_a_missing_iteration_names_the_flag(tmp_path, capsys):
    save_checkpoint(tmp_path, 5, {"a": torch.ones(1)}, {"iteration": 5})
    words = ["reshard", "--load", str(tmp_path), "--save", "new", "--iteration", "6"]
    assert main(words) == 2
    assert "--iteration 6 asks for" in capsys.readouterr().err


def test_a_tokenizer_that_would_not_be_written_is_refused(megatron, capsys):
    words = [
        "convert",
        "megatron-to-hf",
        "--megatron",
        "m",
        "--hf",
        "new",
        "--tokenizer-model",
        "x",
    ]
    assert main([*words, "--no-tokenizer"]) == 2
    assert "--tokenizer-model has no effect with --no-tokenizer" in capsys.readouterr().err
    assert main(words) == 2
    assert "no effect where a model has no tokenizer" in " ".join(capsys.readouterr().err.split())


WRITERS = {
    "hf-to-megatron": "convert hf-to-megatron --hf hf --megatron new",
    "megatron-to-hf": "convert megatron-to-hf --megatron m --hf new",
    "reshard": "reshard --load m --save new",
    "upcycle": "upcycle --load m --save new --num-experts 4",
}


@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("limit", [100, 20_000])
def test_a_disk_that_fills_up_meanwhile_is_an_error_and_leaves_nothing(
    megatron, capsys, command, limit
):
    before = sorted(Path().rglob("*"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code = main(WRITERS[command].split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    message = " ".join(capsys.readouterr().err.split("megatron-switch: error:")[1].split())
    assert "new could not be written to its end, and nothing of it is left" in message
    assert "File too large" in message
    assert "Free some space" in message
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("convert hf-to-megatron --hf hf --megatron new --workers 0", "--workers: takes a whole"),
        (
            "convert hf-to-megatron --hf hf --megatron new --vocab-multiple 0",
            "--vocab-multiple: ta",
        ),
        ("convert megatron-to-hf --megatron m --hf new --vocab-size -1", "--vocab-size: takes a w"),
        ("reshard --load m --save new --workers -1", "--workers: takes a whole number from 1"),
        ("reshard --load m --save new --world-size 0", "--world-size: takes a whole number from 1"),
        (
            "reshard --load m --save new --tensor-model-parallel-size 0",
            "--tensor-model-parallel-size: takes a whole number from 1",
        ),
        (
            "upcycle --hf hf --save new --num-experts 0",
            "--num-experts: takes a whole number from 1",
        ),
        ("upcycle --hf hf --save new --num-experts -1", "--num-experts: takes a whole number"),
        ("upcycle --hf hf --save new --num-experts 4 --workers 0", "--workers: takes a whole"),
        (
            "upcycle --hf hf --save new --num-experts 4 --router-scale nan",
            "--router-scale: takes a number, 0 or more, got 'nan'",
        ),
        (
            "upcycle --hf hf --save new --num-experts 4 --router-scale -1",
            "--router-scale: takes a number, 0 or more, got '-1'",
        ),
    ],
)
def test_counts_are_at_least_one_and_scales_are_numbers(llama, capsys, words, message):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "convert megatron-to-hf --megatron m --hf new --vocab-size 105",
            "--vocab-size 105 asks for more rows than the embedding of m/release has: 104",
        ),
        (
            "convert megatron-to-hf --megatron m --hf new --vocab-size 98",
            "--vocab-size 98 would cut off rows of the tokenizer's 99 tokens",
        ),
        (
            "reshard --load m --save new --expert-tensor-parallel-size 2",
            "The model has no experts, got --expert-tensor-parallel-size 2",
        ),
        (
            "upcycle --load m --save new --num-experts 4 --moe-layer-freq [0,0,0,0]",
            "--moe-layer-freq gives experts to no layer, got [0,0,0,0]",
        ),
        (
            "upcycle --load m --save new --num-experts 4 --moe-layer-freq [0,1]",
            "has 2 entries for 4 layers. Give as many as the decoder has layers",
        ),
        (
            "upcycle --load m --save new --num-experts 4 --switch-decoder-layer-freq [0,1,0,1]",
            "--switch-decoder-layer-freq is for an encoder-decoder, and the model is none",
        ),
    ],
)
def test_what_the_model_does_not_allow_is_named(megatron, capsys, words, message):
    assert main(words.split()) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("new").exists()


def test_stages_of_an_encoder_decoder_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hf_models.save(tmp_path / "hf", "switch_transformers")
    assert main(["convert", "hf-to-megatron", "--hf", "hf", "--megatron", "m"]) == 0
    words = ["reshard", "--load", "m", "--save", "new", "--pipeline-model-parallel-size", "2"]
    assert main(words) == 2
    assert "t5 has no pipeline parallelism" in " ".join(capsys.readouterr().err.split())
    assert not Path("new").exists()
