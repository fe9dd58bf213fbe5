"""Settings of a preparation from its command line, checked before any file is read."""

import re
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import sentencepiece

from megatron_switch.data.preparation.corpus import Corpus
from megatron_switch.data.preparation.documents import ReadOptions
from megatron_switch.data.preparation.prepared import SCHEMA
from megatron_switch.data.preparation.sentencepiece_model import Algorithm, SentencePieceSettings
from megatron_switch.data.preparation.token_shards import available_workers
from megatron_switch.data.preparation.workspace import Workspace, fingerprint_of
from megatron_switch.data.tokenizer import (
    DEFAULT_VOCAB_SIZE,
    FLAGS,
    VOCAB_SIZE_TYPES,
    check_tokenizer_flags,
    training_flags,
)
from megatron_switch.errors import ConfigError
from megatron_switch.flags.train_flags import destination

DEFAULT_SAMPLE_MIB: dict[Algorithm, int] = {"bpe": 16, "unigram": 2}
"""Text to train on: some ten seconds on two cores."""

SENTINELS_FLAG = "--sentinels"

TRAINED_TYPE = "SentencePieceTokenizer"
"""Megatron's name of the tokenizer that is trained here."""

_MIB = 2**20
_MOST_TOKENS = 10_000_000  # far more than any text supports; larger ones take minutes to fail
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}


@dataclass(frozen=True)
class Settings:
    """A checked command line.

    Attributes:
        args: The command line; its tokenizer flags are Megatron's.
        options: How files are read.
        trained: How to train a tokenizer, None where one was given.
        workers: Number of processes.
    """

    args: Namespace
    options: ReadOptions
    trained: SentencePieceSettings | None
    workers: int

    @classmethod
    def from_arguments(cls, args: Namespace) -> "Settings":
        """Check a command line.

        Raises:
            ConfigError: Flags are missing, contradict each other, or would change nothing.
            DataError: A tokenizer's file is missing.
        """
        if args.workers is not None and args.workers < 1:
            raise ConfigError(f"--workers must be at least 1, got {args.workers}.")
        if args.stdlib_tests and not args.stdlib:
            raise ConfigError("--stdlib-tests adds to --stdlib, which was not given. Give both.")
        trained = _training_settings(args)
        if trained is None:
            check_tokenizer_flags(args)
        options = ReadOptions(args.text_key or "text", _separator(args), args.skip_bad_input)
        return cls(args, options, trained, args.workers or available_workers())

    @property
    def tokenizer_type(self) -> str:
        """Megatron's name of the tokenizer."""
        return self.args.tokenizer_type or TRAINED_TYPE

    def tokenizer_arguments(self, trained_model: Path) -> Namespace:
        """Return the flags from which Megatron builds the tokenizer.

        Args:
            trained_model: Where the model is, if one is trained.
        """
        if self.trained is None:
            return self.args
        changed = {"tokenizer_type": TRAINED_TYPE, "tokenizer_model": str(trained_model)}
        return Namespace(**{**vars(self.args), **changed, "vocab_size": None})

    def training_flags(self, workspace: Workspace) -> tuple[str, ...]:
        """Return the flags with which training uses what is made here."""
        tokenizer = self.tokenizer_arguments(workspace.tokenizer_model)
        return ("--data-path", str(workspace.prefix), *training_flags(tokenizer))

    def fingerprint(self, corpus: Corpus) -> str:
        """Return a hash of all that the result depends on.

        ``--skip-bad-input`` is not part of it: without bad input it changes nothing, and with it
        shards and reports record what was left out.
        """
        tokenizer = {flag: getattr(self.args, destination(flag)) for flag in FLAGS}
        names = [value for value in tokenizer.values() if isinstance(value, str) and value]
        return fingerprint_of(
            {
                "schema": SCHEMA,
                "files": [[str(file.path), file.size, file.modified_ns] for file in corpus.files],
                "text_key": self.options.text_key,
                "separator": self.options.separator,
                "tokenizer": tokenizer,
                "tokenizer_files": [state for name in names for state in _file_states(Path(name))],
                "trained": self.trained and [asdict(self.trained), sentencepiece.__version__],
            }
        )


def _training_settings(args: Namespace) -> SentencePieceSettings | None:
    """Return how to train a tokenizer, None when one was given.

    Raises:
        ConfigError: Flags of one case were given in the other.
    """
    if args.tokenizer_type is None and args.tokenizer_model is not None:
        raise ConfigError(
            f"--tokenizer-model {args.tokenizer_model} needs --tokenizer-type, which says how to "
            "read it: SentencePieceTokenizer, HuggingFaceTokenizer, TikTokenizer, ..."
        )
    trains = args.tokenizer_type in (None, "SentencePieceTokenizer") and not args.tokenizer_model
    if not trains:
        unused = {
            "--sentencepiece-algorithm": args.sentencepiece_algorithm,
            "--tokenizer-sample-mib": args.tokenizer_sample_mib,
            SENTINELS_FLAG: args.sentinels,
        }
        if args.tokenizer_type not in VOCAB_SIZE_TYPES:
            unused["--vocab-size"] = args.vocab_size
        given = [flag for flag, value in unused.items() if value is not None]
        if given:
            raise ConfigError(
                f"{' and '.join(given)} would change nothing: --tokenizer-type "
                f"{args.tokenizer_type} is finished already. Leave it out, or leave the tokenizer "
                "out to train one."
            )
        return None
    algorithm: Algorithm = args.sentencepiece_algorithm or "bpe"
    mib = args.tokenizer_sample_mib or DEFAULT_SAMPLE_MIB[algorithm]
    vocab_size = DEFAULT_VOCAB_SIZE if args.vocab_size is None else args.vocab_size
    for flag, value in (("--tokenizer-sample-mib", mib), ("--vocab-size", vocab_size)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}.")
    if vocab_size > _MOST_TOKENS:
        raise ConfigError(
            f"--vocab-size must be at most {_MOST_TOKENS:,}, got {vocab_size:,}. 32,000 to 256,000 "
            "are usual."
        )
    sentinels = args.sentinels or 0
    if not 0 <= sentinels < vocab_size:
        raise ConfigError(
            f"Sentinels are some of the tokens, but {SENTINELS_FLAG} is {sentinels} and "
            f"--vocab-size {vocab_size}. T5 has 100 of 32,100."
        )
    return SentencePieceSettings(vocab_size, algorithm, mib * _MIB, sentinels)


def _separator(args: Namespace) -> str | None:
    if args.document_separator is None:
        return None
    if not args.document_separator:
        raise ConfigError("--document-separator is empty; give the text between documents.")
    return re.sub(r"\\([nrt\\])", lambda found: _ESCAPES[found[1]], args.document_separator)


def _file_states(path: Path) -> list[list[object]]:
    """Return name, size and time of change of a file, or of all files of a folder."""
    if not path.exists():
        return []
    paths = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [(name, name.stat()) for name in paths if name.is_file()]
    return [[str(name), state.st_size, state.st_mtime_ns] for name, state in states]
