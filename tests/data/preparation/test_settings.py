"""Flags that contradict each other or would change nothing are refused before a file is read."""

import dataclasses
from pathlib import Path

import pytest

from megatron_switch.data.preparation.corpus import find_corpus
from megatron_switch.data.preparation.documents import ReadOptions
from megatron_switch.data.preparation.sentencepiece_model import SentencePieceSettings
from megatron_switch.data.preparation.settings import Settings
from megatron_switch.data.preparation.workspace import Workspace
from megatron_switch.errors import ConfigError, DataError

MODEL = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model")


@pytest.fixture
def settings(parse):
    return lambda *words: Settings.from_arguments(parse("--output", "out", *words))


def test_a_sentencepiece_model_is_trained_by_default(settings):
    found = settings()
    assert found.options == ReadOptions("text", None, False)
    assert found.trained == SentencePieceSettings(32_000, "bpe", 16 * 2**20)
    assert found.workers >= 1


def test_given_flags_win_over_defaults(settings):
    found = settings(
        *("--text-key", "body", "--document-separator", r"\n\n", "--skip-bad-input"),
        *("--vocab-size", 500, "--sentencepiece-algorithm", "unigram", "--workers", 3),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-sample-mib", 5),
    )
    assert found.options == ReadOptions("body", "\n\n", True)
    assert found.trained == SentencePieceSettings(500, "unigram", 5 * 2**20)
    assert found.workers == 3


def test_sentinels_are_some_of_the_tokens(settings):
    found = settings("--vocab-size", 500, "--sentinels", 100).trained
    assert found == SentencePieceSettings(500, "bpe", 16 * 2**20, sentinels=100)


def test_a_finished_tokenizer_gets_no_sentinels(settings, sentencepiece_model):
    with pytest.raises(ConfigError, match=r"--sentinels would change nothing"):
        settings(*MODEL, sentencepiece_model, "--sentinels", 10)


def test_flags_for_training(settings, sentencepiece_model):
    workspace = Workspace(Path("out"), "")
    given = settings(*MODEL, sentencepiece_model)
    assert given.trained is None
    assert given.training_flags(workspace) == (
        *("--data-path", "out/corpus"),
        *(*MODEL, str(sentencepiece_model)),
    )
    trained = settings("--vocab-size", 500)
    assert trained.training_flags(workspace) == (
        *("--data-path", "out/corpus"),
        *(*MODEL, "out/tokenizer.model"),
    )


@pytest.mark.parametrize(
    ("given", "separator"),
    [
        (r"\n\n", "\n\n"),
        (r"\r\n---\t", "\r\n---\t"),
        (r"\\n", r"\n"),
        ("<|e|>", "<|e|>"),
        ("ä\\", "ä\\"),
    ],
)
def test_escapes_in_a_separator(settings, given, separator):
    assert settings("--document-separator", given).options.separator == separator


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", 0], "--workers must be at least 1, got 0"),
        (["--stdlib-tests"], "--stdlib-tests adds to --stdlib, which was not given"),
        (["--document-separator", ""], "--document-separator is empty"),
        (["--sentinels", 500, "--vocab-size", 500], "--sentinels is 500 and --vocab-size 500"),
        (["--sentinels", -1], "--sentinels is -1 and --vocab-size 32000"),
        (["--vocab-size", 0], "--vocab-size must be at least 1, got 0"),
        (
            ["--vocab-size", 99999999999],
            "--vocab-size must be at most 10,000,000, got 99,999,999,999",
        ),
        (["--tokenizer-sample-mib", -1], "--tokenizer-sample-mib must be at least 1, got -1"),
        (["--tokenizer-model", "x"], "--tokenizer-model x needs --tokenizer-type, which says"),
        (
            [*MODEL, "x", "--vocab-size", 9],
            "--vocab-size would change nothing: --tokenizer-type SentencePieceTokenizer is",
        ),
        (
            ["--tokenizer-type", "NullTokenizer", "--vocab-size", 9, "--tokenizer-sample-mib", 1],
            "--tokenizer-sample-mib would change nothing: --tokenizer-type NullTokenizer",
        ),
        (
            ["--tokenizer-type", "HuggingFaceTokenizer", "--sentencepiece-algorithm", "bpe"],
            "--sentencepiece-algorithm would change nothing",
        ),
        (["--tokenizer-type", "Llama2Tokenizer"], "Llama2Tokenizer needs --tokenizer-model"),
    ],
)
def test_contradictions_are_refused(settings, words, message):
    with pytest.raises(ConfigError, match=message):
        settings(*words)


def test_a_missing_model_is_refused_before_the_input_is_read(settings):
    with pytest.raises(DataError, match="--tokenizer-model gone does not exist"):
        settings(*MODEL, "gone")


def test_the_fingerprint_follows_what_the_result_depends_on(settings, folder, tmp_path):
    corpus = find_corpus([folder])
    model = tmp_path / "m.model"
    model.write_text("a")
    different = [
        [],
        ["--vocab-size", 300],
        ["--sentencepiece-algorithm", "unigram"],
        ["--tokenizer-sample-mib", 3],
        ["--text-key", "body"],
        ["--document-separator", "x"],
        [*MODEL, model],
        [*MODEL, folder / "a.txt"],
    ]
    prints = [settings(*words).fingerprint(corpus) for words in different]
    assert len(set(prints)) == len(different)
    without_effect = ["--workers", 7, "--skip-bad-input", "--overwrite"]
    assert settings(*without_effect).fingerprint(corpus) == prints[0]
    model.write_text("another model")
    assert settings(*MODEL, model).fingerprint(corpus) not in prints
    (folder / "a.txt").write_text("changed")
    assert settings().fingerprint(find_corpus([folder])) not in prints
    fewer = dataclasses.replace(corpus, files=corpus.files[1:])
    assert settings().fingerprint(fewer) not in prints
