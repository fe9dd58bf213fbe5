"""Tokenizers are Megatron's, from Megatron's flags; what is missing is said before it is asked."""

import base64
import importlib.util
import inspect
import json
import re
from types import SimpleNamespace

import pytest
import sentencepiece

from megatron_switch.data.tokenizer import (
    FLAGS,
    TOKENIZER_TYPES,
    build_tokenizer,
    check_tokenizer_flags,
    training_flags,
)
from megatron_switch.errors import ConfigError, DataError
from megatron_switch.flags.train_flags import destination

TEXT = "switch the router\n  to expert 7: naïve café\n"


@pytest.fixture
def flags(parse):
    """Return a function from tokenizer flags to a namespace."""
    return lambda *words: parse("--output", "out", *words)


@pytest.fixture(scope="session")
def hugging_face_folder(tmp_path_factory):
    """A byte-level BPE tokenizer as Hugging Face saves it, which ends every text with <end>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([TEXT * 9], trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", inner.token_to_id("<end>"))]
    )
    folder = tmp_path_factory.mktemp("hugging_face")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiktoken_file(tmp_path_factory):
    """A vocabulary of the 256 bytes in the form that Megatron reads."""
    entries = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": ""}
        for byte in range(256)
    ]
    path = tmp_path_factory.mktemp("tiktoken") / "vocab.json"
    path.write_text(json.dumps(entries))
    return path


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer"])
def test_a_sentencepiece_model_brings_text_back(flags, sentencepiece_model, kind):
    tokenizer = build_tokenizer(
        flags("--tokenizer-type", kind, "--tokenizer-model", sentencepiece_model)
    )
    assert (tokenizer.vocab_size, tokenizer.eod) == (300, 1)
    assert tokenizer.built.detokenize(tokenizer.built.tokenize(TEXT)) == TEXT


def test_a_hugging_face_tokenizer_ends_texts_unless_a_flag_says_no(flags, hugging_face_folder):
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", hugging_face_folder]
    tokenizer = build_tokenizer(flags(*words))
    assert tokenizer.vocab_size == 280
    ids = tokenizer.built.tokenize(TEXT)
    assert ids[-1] == tokenizer.eod  # what the shards must not double
    assert tokenizer.built.detokenize(ids[:-1]) == TEXT
    bare = build_tokenizer(flags(*words, "--tokenizer-hf-no-include-special-tokens"))
    assert bare.built.tokenize(TEXT) == ids[:-1]


def test_code_in_a_tokenizers_folder_runs_only_if_the_flag_says_so(flags, tmp_path):
    ran = tmp_path / "ran"
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "own"}))
    code = f"from pathlib import Path\nPath({str(ran)!r}).touch()\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder]
    with pytest.raises(ConfigError, match=r"Python code of its own.*add --trust-remote-code"):
        build_tokenizer(flags(*words))
    assert not ran.exists()
    with pytest.raises(DataError):  # it runs, and is no tokenizer
        build_tokenizer(flags(*words, "--trust-remote-code"))
    assert ran.exists()


def test_a_tiktoken_vocabulary_brings_text_back(flags, tiktoken_file):
    tokenizer = build_tokenizer(
        flags(
            *("--tokenizer-type", "TikTokenizer", "--tokenizer-model", tiktoken_file),
            *("--tiktoken-num-special-tokens", 10, "--vocab-size", 266),
        )
    )
    assert (tokenizer.vocab_size, tokenizer.eod) == (266, 2)
    assert tokenizer.built.detokenize(tokenizer.built.tokenize(TEXT)) == TEXT


def test_the_null_tokenizer_reads_numbers(flags):
    tokenizer = build_tokenizer(
        flags("--tokenizer-type", "NullTokenizer", "--vocab-size", 64, "--null-tokenizer-eod-id", 5)
    )
    assert (tokenizer.vocab_size, tokenizer.eod) == (64, 5)
    assert tokenizer.built.tokenize("3 1 4\n") == [3, 1, 4]


def test_every_flag_that_megatrons_builder_reads_is_there():
    from megatron.core.tokenizers.utils import build_tokenizer as upstream

    read = set(re.findall(r"\bargs\.(\w+)", inspect.getsource(upstream.build_tokenizer)))
    of_images_and_conversations = {
        "tokenizer_prompt_format",
        "image_tag_type",
        "force_system_message",
        "sft_tokenizer_prompt_format",
    }
    assert read - of_images_and_conversations - {"pad_vocab_size"} <= {
        destination(name) for name in FLAGS
    }
    others = {"MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer"}
    assert set(upstream.SUPPORTED_TOKENIZERS) - others == set(TOKENIZER_TYPES)


def test_training_flags_are_those_that_differ_from_the_default(flags):
    words = [
        *("--tokenizer-type", "TikTokenizer", "--tokenizer-model", "a b.json"),
        *("--vocab-size", "99", "--tokenizer-special-tokens", "<a>", "<b>"),
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces",
        "--trust-remote-code",
    ]
    args = flags(*words)
    assert sorted(training_flags(args)) == sorted(words)
    assert flags(*training_flags(args)) == args
    assert training_flags(flags()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "There is no tokenizer: give --tokenizer-type"),
        (["NullTokenizer"], "NullTokenizer needs --vocab-size, and it was not given"),
        (["SentencePieceTokenizer"], "SentencePieceTokenizer needs --tokenizer-model, and it"),
        (["HuggingFaceTokenizer"], "HuggingFaceTokenizer needs --tokenizer-model, and it was not"),
        (["TikTokenizer"], "TikTokenizer needs --tokenizer-model, and it was not given"),
        (["GPT2BPETokenizer"], "GPT2BPETokenizer needs --vocab-file, and it was not given"),
        (["GPT2BPETokenizer", "--vocab-file", "v"], "GPT2BPETokenizer needs --merge-file, and"),
        (["BertWordPieceCase"], "BertWordPieceCase needs --vocab-file, and it was not given"),
    ],
)
def test_a_missing_flag_is_named(flags, words, message):
    with pytest.raises(ConfigError, match=message):
        check_tokenizer_flags(flags(*(["--tokenizer-type", *words] if words else [])))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SentencePieceTokenizer"], r"--tokenizer-model gone/x does not exist\. Give the path"),
        (["TikTokenizer"], "--tokenizer-model gone/x does not exist"),
        (["NullTokenizer", "--vocab-size", 9, "--tokenizer-metadata", "m"], "metadata m does not"),
        (["GPT2BPETokenizer", "--vocab-file", "v", "--merge-file", "m"], "--vocab-file v does not"),
    ],
)
def test_a_missing_file_is_named(flags, words, message):
    with pytest.raises(DataError, match=message):
        build_tokenizer(flags("--tokenizer-model", "gone/x", "--tokenizer-type", *words))


def test_a_hugging_face_path_that_is_missing_is_told_from_a_name(flags, tmp_path):
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    with pytest.raises(DataError, match=r"--tokenizer-model .*/gone does not exist"):
        check_tokenizer_flags(flags(*words, tmp_path / "gone"))
    check_tokenizer_flags(flags(*words, "someone/something"))  # may be on the hub
    with pytest.raises(DataError, match="could not build a tokenizer from --tokenizer-type Hugg"):
        build_tokenizer(flags(*words, "someone/something"))  # and is not


def test_a_folder_is_no_model_file(flags, tmp_path):
    with pytest.raises(DataError, match=r"is no file, and TikTokenizer is read from one"):
        check_tokenizer_flags(
            flags("--tokenizer-type", "TikTokenizer", "--tokenizer-model", tmp_path)
        )


@pytest.mark.parametrize("package", ["transformers", "tiktoken"])
def test_a_missing_package_is_named(flags, monkeypatch, tmp_path, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    kind = {"transformers": "HuggingFaceTokenizer", "tiktoken": "TikTokenizer"}[package]
    source = {"transformers": r"'megatron-switch\[hf\]'", "tiktoken": "tiktoken"}[package]
    with pytest.raises(ConfigError, match=rf"needs the package {package}.* pip install {source}"):
        check_tokenizer_flags(flags("--tokenizer-type", kind, "--tokenizer-model", tmp_path))


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "TikTokenizer"])
def test_a_damaged_model_is_named(flags, tmp_path, kind):
    path = tmp_path / "tokenizer.json"
    path.write_text("no model")
    with pytest.raises(DataError, match=rf"could not build .* {kind} --tokenizer-model .*json: "):
        build_tokenizer(flags("--tokenizer-type", kind, "--tokenizer-model", path))


def test_a_tokenizer_without_an_end_is_refused(flags, tmp_path, make_text):
    path = tmp_path / "endless"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(make_text(50).splitlines()),
        model_prefix=str(path),
        vocab_size=30,
        eos_id=-1,
        minloglevel=4,
    )
    with pytest.raises(DataError, match=r"no token that ends a document \(got -1 of 30 tokens\)"):
        build_tokenizer(
            flags("--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", f"{path}.model")
        )


def test_an_end_outside_the_vocabulary_is_refused(flags):
    words = ["--vocab-size", 8, "--null-tokenizer-eod-id", 8]
    with pytest.raises(DataError, match=r"no token that ends a document \(got 8 of 8 tokens\)"):
        build_tokenizer(flags("--tokenizer-type", "NullTokenizer", *words))


def test_a_training_namespace_can_be_checked():
    """Training checks with Megatron's own namespace, which knows tokenizers of images too."""
    check_tokenizer_flags(
        SimpleNamespace(
            tokenizer_type="MultimodalTokenizer",
            tokenizer_model=None,
            vocab_size=None,
            vocab_file=None,
            merge_file=None,
            metadata_path=None,
        )
    )
