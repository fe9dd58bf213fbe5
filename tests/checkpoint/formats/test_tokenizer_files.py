"""A SentencePiece model becomes the same tokenizer in Hugging Face's format."""

import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import sentencepiece
import transformers

from megatron_switch.checkpoint.formats import tokenizer_files
from megatron_switch.checkpoint.formats.tokenizer_files import tokenizer_flags, write_tokenizer
from megatron_switch.data.preparation.sentencepiece_model import (
    SentencePieceSettings,
    train_sentencepiece,
)
from megatron_switch.errors import CheckpointError

TEXT = Path(shutil.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request, tmp_path_factory) -> Path:
    settings = SentencePieceSettings(
        vocab_size=600, algorithm=request.param, sample_bytes=10**5, sentinels=3
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_sentencepiece([TEXT], settings))
    return path


def arguments(kind, path):
    return Namespace(tokenizer_type=kind, tokenizer_model=None if path is None else str(path))


def test_it_encodes_and_decodes_alike(model, tmp_path):
    note = write_tokenizer(arguments("SentencePieceTokenizer", model), tmp_path, tmp_path)
    assert "tokenizer.json" in note
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for line in TEXT.splitlines(keepends=True)[:300]:
        assert theirs.encode(line, add_special_tokens=False) == ours.encode(line)
        assert theirs.decode(ours.encode(line)) == line
    assert len(theirs) == ours.vocab_size()
    assert theirs.eos_token_id == ours.eos_id()
    assert theirs.pad_token_id == ours.pad_id()


def test_only_the_tokenizer_of_a_t5_ends_texts(model, tmp_path):
    end = sentencepiece.SentencePieceProcessor(model_file=str(model)).eos_id()
    for arch in ("gpt", "t5"):
        args = Namespace(**vars(arguments("SentencePieceTokenizer", model)), switch_arch=arch)
        (tmp_path / arch).mkdir()
        write_tokenizer(args, tmp_path / arch, tmp_path)
    plain, ending = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / arch) for arch in ("gpt", "t5")
    )
    for text in ("Hello world!", "", "def f(x):"):
        ids = plain(text).input_ids
        assert ids == plain.encode(text, add_special_tokens=False)
        assert ending(text).input_ids == [*ids, end]
        assert ending.decode([*ids, end], skip_special_tokens=True) == plain.decode(ids)


def test_a_tokenizer_that_would_differ_is_refused(model, tmp_path, monkeypatch):
    original = tokenizer_files._json
    monkeypatch.setattr(tokenizer_files, "_json", lambda p: original(p).replace('" "', '"_"'))
    with pytest.raises(CheckpointError, match=r"cannot be written as tokenizer.json exactly: 'Hel"):
        write_tokenizer(arguments("SentencePieceTokenizer", model), tmp_path, tmp_path)


def test_a_tokenizer_in_their_format_is_copied(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    (tmp_path / "to").mkdir()
    args = arguments("HuggingFaceTokenizer", tmp_path / "from")
    assert "tokenizer.json" in write_tokenizer(args, tmp_path / "to", tmp_path)
    assert (tmp_path / "to" / "tokenizer.json").exists()
    # The checkpoint moved, and its tokenizer with it.
    gone = arguments("HuggingFaceTokenizer", "/elsewhere/from")
    assert "copied" in write_tokenizer(gone, tmp_path / "to", tmp_path)


def test_a_tokenizer_that_is_gone_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"/gone/t.model, which is not there.*--no-tokenizer"):
        write_tokenizer(arguments("SentencePieceTokenizer", "/gone/t.model"), tmp_path, tmp_path)


def test_no_tokenizer_is_said(tmp_path):
    assert "none is written" in write_tokenizer(
        arguments("NullTokenizer", None), tmp_path, tmp_path
    )


@pytest.mark.parametrize(
    ("name", "kind", "model"),
    [
        ("tokenizer.json", "HuggingFaceTokenizer", "there"),
        ("spiece.model", "SentencePieceTokenizer", "there/spiece.model"),
        ("README", "NullTokenizer", None),
    ],
)
def test_flags_name_what_will_lie_in_the_checkpoint(tmp_path, name, kind, model):
    (tmp_path / name).write_text("")
    flags = tokenizer_flags(tmp_path, Path("there"), 100)
    assert flags["tokenizer-type"] == kind
    assert flags.get("tokenizer-model") == model
    assert kind != "NullTokenizer" or flags["vocab-size"] == 100
