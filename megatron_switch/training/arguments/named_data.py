"""The words by which a command line names data, those in list files included.

Megatron takes prefixes after flags, or from a file: ``--data-args-path`` holds what ``--data-path``
takes, and ``--per-split-data-args-path`` is a JSON object with the three splits' words. It reads
such a file only when training is set up; here it is read first, so that what it names is checked as
if it stood on the command line.
"""

import json
from argparse import Namespace
from pathlib import Path

from megatron_switch.errors import DataError

_SPLIT_KEYS = {"train": "train_data_path", "valid": "valid_data_path", "test": "test_data_path"}
BLENDS = ("data_path", *_SPLIT_KEYS.values())
"""Attributes of the flags that take prefixes, or weights and prefixes in turn."""


def named_data(args: Namespace) -> dict[str, list[str]]:
    """Return the words of each attribute of :data:`BLENDS` for which there are any.

    Args:
        args: Parsed arguments, or those in a checkpoint.

    Raises:
        DataError: A list file cannot be read, or holds no list.
    """
    found = {name: list(getattr(args, name, None) or []) for name in BLENDS}
    # A checkpoint's arguments may be those of another program.
    if (path := getattr(args, "data_args_path", None)) is not None:
        found["data_path"] = _text_words(path)
    if (path := getattr(args, "per_split_data_args_path", None)) is not None:
        found |= _split_words(path)
    return {name: words for name, words in found.items() if words}


def _text_words(path: str) -> list[str]:
    words = _read("--data-args-path", path).split()
    if not words:
        raise DataError(
            f"--data-args-path {path} is empty. It holds what --data-path takes: prefixes, or "
            "weights and prefixes in turn."
        )
    return words


def _split_words(path: str) -> dict[str, list[str]]:
    flag = "--per-split-data-args-path"
    try:
        content = json.loads(_read(flag, path))
        lists = {name: content[key] for key, name in _SPLIT_KEYS.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{flag} {path} is not a JSON object with train, valid and test ({error!r}). Each "
            "holds what --data-path takes, as a list or a text, or null."
        ) from error
    words = {}
    for name, value in lists.items():
        given = value.split() if isinstance(value, str) else value or []
        if not (isinstance(given, list) and all(isinstance(word, str) for word in given)):
            raise DataError(
                f"{flag} {path} has {value!r} for --{name.replace('_', '-')}. Give a list of "
                "texts: prefixes, or weights and prefixes in turn."
            )
        words[name] = given
    return words


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{flag} {path} cannot be read: {error}. Give the file's path.") from error
