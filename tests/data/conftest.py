"""Fixtures of the data tests: a command line, a small corpus, a small tokenizer."""

import argparse
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_switch.commands.prepare import add_arguments
from megatron_switch.data.preparation.sentencepiece_model import (
    SentencePieceSettings,
    train_sentencepiece,
)

WORDS = ("expert", "router", "token", "gate", "slot", "layer", "switch", "train", "load", "drop")


def sentences(count: int, *, seed: str = "") -> str:
    """Return lines of known words in an order that looks random and always is the same."""
    digest = [hashlib.sha256(f"{seed}{line}".encode()).digest() for line in range(count)]
    return "".join(
        " ".join(WORDS[byte % len(WORDS)] for byte in line[: 4 + line[0] % 12]) + ".\n"
        for line in digest
    )


@pytest.fixture(scope="session")
def make_text() -> Callable[..., str]:
    return sentences


@pytest.fixture(scope="session")
def parse() -> Callable[..., argparse.Namespace]:
    """Return a function from words of a command line to what ``prepare`` takes."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return lambda *words: parser.parse_args([str(word) for word in words])


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    settings = SentencePieceSettings(vocab_size=300, algorithm="bpe", sample_bytes=2**20)
    path.write_bytes(train_sentencepiece([sentences(300)], settings))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with four text files, one of them empty."""
    root = tmp_path / "text"
    (root / "b").mkdir(parents=True)
    (root / "a.txt").write_text(sentences(20, seed="a"))
    (root / "b" / "c.md").write_text("# Überschrift\r\n\r\n\tcode  \u2026\n")
    (root / "b" / "d.py").write_text("def f(x):\n    return x  # 日本\n")
    (root / "empty.txt").touch()
    return root


@pytest.fixture
def texts(make_text):
    return [make_text(9, seed=str(index)) + "\tä…\r\n" * index for index in range(8)]


@pytest.fixture
def source(tmp_path, texts):
    """A folder with one text file for every text, in their order."""
    (tmp_path / "text").mkdir()
    for index, text in enumerate(texts):
        (tmp_path / "text" / f"{index}.txt").write_bytes(text.encode())
    return tmp_path / "text"


@pytest.fixture
def command(parse, tmp_path, source):
    """Return a function to the command that trains a tokenizer and prepares the folder."""
    fixed = ("--output", tmp_path / "out", "--vocab-size", 300, "--workers", 1)
    return lambda *words: parse(source, *fixed, *words)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"
