"""An export is what was imported: rows of the vocabulary, tokens with a meaning, generation.

The tokenizer has fewer tokens than the embedding has rows, as that of every released T5, and the
embedding was padded; what was trained on from the import is exported in the same way.
"""

import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from support import hf_models
from support.tiny_run import run_command

from megatron_switch.checkpoint.formats.hf_folder import read_json, write_json
from megatron_switch.checkpoint.formats.source_settings import FILE, TOKEN_IDS

ROWS, TOKENS = 99, 92
EMBEDDINGS = {
    "llama": ["model.embed_tokens.weight", "lm_head.weight"],
    "switch_transformers": ["shared.weight"],
}
IDS = {
    "llama": {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": None},
    "switch_transformers": {
        "pad_token_id": 3,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "bos_token_id": None,
    },
}


def succeeded(*words: str) -> str:
    outcome = run_command(*words)
    assert outcome.code == 0, outcome.screen + outcome.errors
    return outcome.screen


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("tokenizer") / "spiece"
    sentencepiece.SentencePieceTrainer.train(
        input=shutil.__file__, model_prefix=str(prefix), vocab_size=TOKENS, minloglevel=2
    )
    return prefix.with_suffix(".model")


@pytest.fixture(params=list(IDS))
def source(request, tmp_path, tokenizer) -> Path:
    """A model in Hugging Face's format with a tokenizer, the name of its folder its type."""
    folder = tmp_path / request.param
    hf_models.save(folder, request.param)
    shutil.copyfile(tokenizer, folder / "spiece.model")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, **IDS[request.param]})
    write_json(folder / "generation_config.json", {"temperature": 0.6, "eos_token_id": [6, 7]})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("multiple", [8, 128])  # Megatron's own rule would take 92 rows for 128
def test_there_and_back_and_after_training(tmp_path, source, multiple):
    megatron, trained = tmp_path / "m", tmp_path / "trained"
    imported = ("--hf", str(source), "--megatron", str(megatron))
    succeeded("convert", "hf-to-megatron", *imported, "--vocab-multiple", str(multiple))
    succeeded(
        *("train", "--load", str(megatron), "--use-checkpoint-args", "--save", str(trained)),
        *("--mock-data", "--train-iters", "1", "--lr", "0", "--micro-batch-size", "1"),
        *("--eval-iters", "0", "--switch-device", "cpu", "--save-interval", "1"),
    )
    before = load_file(source / "model.safetensors")
    for folder in (megatron, trained):
        back = tmp_path / f"{folder.name}-back"
        succeeded("convert", "megatron-to-hf", "--megatron", str(folder), "--hf", str(back))
        config = read_json(back / "config.json")
        assert config["vocab_size"] == ROWS
        ids = IDS[source.name]
        assert {name: config[name] for name in TOKEN_IDS if name in config} == ids
        assert read_json(back / "generation_config.json") == read_json(
            source / "generation_config.json"
        )
        after = load_file(back / "model.safetensors")
        for key in EMBEDDINGS[source.name]:
            assert after[key].equal(before[key])


@pytest.mark.slow
@pytest.mark.parametrize("command", ["reshard", "upcycle --num-experts 2"])
def test_what_is_made_of_a_checkpoint_does_not_need_it_any_more(tmp_path, tokenizer, command):
    hf, megatron, new, back = (str(tmp_path / name) for name in ("hf", "m", "new", "back"))
    hf_models.save(Path(hf), "llama")
    shutil.copyfile(tokenizer, Path(hf) / "spiece.model")
    write_json(Path(hf) / "config.json", {**read_json(Path(hf) / "config.json"), **IDS["llama"]})
    succeeded("convert", "hf-to-megatron", "--hf", hf, "--megatron", megatron)
    succeeded(*command.split(), "--load", megatron, "--save", new)
    shutil.rmtree(megatron)
    succeeded("convert", "megatron-to-hf", "--megatron", new, "--hf", back)
    config = read_json(Path(back) / "config.json")
    assert {name: config[name] for name in TOKEN_IDS if name in config} == IDS["llama"]
    assert config["vocab_size"] == ROWS
    assert (Path(back) / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gpt", "t5"])
def test_a_run_of_ours_is_exported_with_the_tokens_of_its_tokenizer(tmp_path, tokenizer, arch):
    model = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --eval-iters 0 "
        "--micro-batch-size 1 --train-iters 1 --save-interval 1 --lr 1e-3 --mock-data "
        "--switch-device cpu --tokenizer-type SentencePieceTokenizer "
        f"--tokenizer-model {tokenizer} "
    )
    model += {
        "gpt": "--position-embedding-type rope --normalization RMSNorm --swiglu "
        "--disable-bias-linear --max-position-embeddings 16",
        "t5": "--switch-arch t5 --decoder-seq-length 16",
    }[arch]
    succeeded("train", *model.split(), "--save", str(tmp_path / "run"))
    back = tmp_path / "back"
    succeeded("convert", "megatron-to-hf", "--megatron", str(tmp_path / "run"), "--hf", str(back))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    end = processor.eos_id()
    expected = {
        "gpt": {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None},
        "t5": {"eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": end},
    }[arch]  # the model has no token to fill with, so the end token does
    config = read_json(back / "config.json")
    assert {name: config[name] for name in TOKEN_IDS if name in config} == expected
    assert config["vocab_size"] == TOKENS
    generation = read_json(back / "generation_config.json")
    assert generation["eos_token_id"] == end


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [127, 128])  # with a row of padding and without
def test_numbers_for_tokens_are_all_exported(tmp_path, tokens):
    model = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --eval-iters 0 "
        "--micro-batch-size 1 --train-iters 1 --save-interval 1 --lr 1e-3 --mock-data "
        "--max-position-embeddings 16 --switch-device cpu --tokenizer-type NullTokenizer "
        f"--vocab-size {tokens} "
    )
    succeeded("train", *model.split(), "--save", str(tmp_path / "run"))
    back = tmp_path / "back"
    succeeded("convert", "megatron-to-hf", "--megatron", str(tmp_path / "run"), "--hf", str(back))
    config = read_json(back / "config.json")
    assert (config["vocab_size"], config["eos_token_id"]) == (tokens, tokens - 1)
    assert load_file(back / "model.safetensors")["model.embed_tokens.weight"].size(0) == tokens


@pytest.mark.slow
def test_a_damaged_file_of_settings_is_named(tmp_path, tokenizer):
    hf_models.save(tmp_path / "hf", "llama")
    shutil.copyfile(tokenizer, tmp_path / "hf" / "spiece.model")
    megatron, back = str(tmp_path / "m"), str(tmp_path / "back")
    succeeded("convert", "hf-to-megatron", "--hf", str(tmp_path / "hf"), "--megatron", megatron)
    write_json(tmp_path / "m" / "tokenizer" / FILE, {"vocab_size": "all"})
    outcome = run_command("convert", "megatron-to-hf", "--megatron", megatron, "--hf", back)
    assert outcome.code == 2
    errors = " ".join(outcome.errors.split())
    assert f"{FILE}, key 'vocab_size': expected a whole number" in errors
    assert not Path(back).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "", "cannot be used: Megatron could not build a tokenizer"),
        ("spiece.model", "no model", "cannot be used: Megatron could not build a tokenizer"),
        ("spiece.model", None, f"has {TOKENS} tokens, more than the 88 rows of the embedding"),
    ],
)
def test_a_tokenizer_that_does_not_work_is_told_at_once(tmp_path, tokenizer, name, content, words):
    hf_models.save(tmp_path / "hf", "llama", vocab_size=85)
    if content is None:
        shutil.copyfile(tokenizer, tmp_path / "hf" / name)
    else:
        (tmp_path / "hf" / name).write_text(content)
    folders = ("--hf", str(tmp_path / "hf"), "--megatron", str(tmp_path / "m"))
    screen = " ".join(succeeded("convert", "hf-to-megatron", *folders).split())
    assert f"The tokenizer of {tmp_path / 'hf'} was copied, but {words}" in screen
    assert "Add --tokenizer-type and --tokenizer-model of another one" in screen


@pytest.mark.slow
def test_what_no_library_reads_is_left_out_and_told(tmp_path):
    hf_models.save(tmp_path / "hf", "llama")
    path = tmp_path / "hf" / "model.safetensors"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**load_file(path), name: torch.ones(4)}, path, {"format": "pt"})
    folders = ("--hf", str(tmp_path / "hf"), "--megatron", str(tmp_path / "m"))
    screen = succeeded("convert", "hf-to-megatron", *folders)
    assert f"Left out, because nothing depends on them: {name}." in screen
    assert "all equal, bit for bit" in succeeded("convert", "verify", "--tensors-only", *folders)
