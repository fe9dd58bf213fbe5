"""What the data flags name, entries of list files included.

A data flag takes prefixes of token files, or weights and prefixes in turn; for an encoder-decoder
also ``.jsonl`` files of pairs of texts. Megatron takes these entries after the flag, or from a
file: ``--data-args-path`` holds what ``--data-path`` takes, and ``--per-split-data-args-path`` is a
JSON object with the entries of the three splits. It reads such a file only when training is set up;
here it is read first, so that its entries are checked like those of a command line.
"""

import json
from argparse import Namespace
from pathlib import Path

from megatron_switch.data.text_to_text import SUFFIX
from megatron_switch.errors import ConfigError, DataError

_SPLIT_KEYS = {"train": "train_data_path", "valid": "valid_data_path", "test": "test_data_path"}
_BLENDS = ("data_path", *_SPLIT_KEYS.values())
"""Attributes of the flags that take entries."""


def data_entries(args: Namespace) -> dict[str, list[str]]:
    """Return the prefixes and weights of each data flag that has any, by its attribute.

    Args:
        args: Parsed arguments, or those in a checkpoint.

    Raises:
        DataError: A list file cannot be read, or holds no list.
    """
    found = {name: list(getattr(args, name, None) or []) for name in _BLENDS}
    # A checkpoint's arguments may be those of another program.
    if (path := getattr(args, "data_args_path", None)) is not None:
        found["data_path"] = _text_entries(path)
    if (path := getattr(args, "per_split_data_args_path", None)) is not None:
        found |= _split_entries(path)
    return {name: entries for name, entries in found.items() if entries}


def _is_pairs(path: str) -> bool:
    """Whether a data path names pairs of texts."""
    return path.endswith(SUFFIX)


def data_paths(args: Namespace) -> list[str]:
    """Return the entries of the command line's data flags, weights included."""
    return [entry for name in _BLENDS for entry in getattr(args, name) or []]


def reads_pairs(args: Namespace) -> bool:
    """Whether the data flags name pairs of texts."""
    return any(map(_is_pairs, data_paths(args)))


def check_pair_paths(args: Namespace) -> None:
    """Refuse data flags that name pairs of texts and something else.

    Raises:
        ConfigError: Naming what is not a file of pairs.
    """
    if not reads_pairs(args):
        return
    others = [path for path in data_paths(args) if not _is_pairs(path)]
    if others:
        raise ConfigError(
            f"Files of pairs cannot be mixed with other data: {', '.join(others)} is no {SUFFIX} "
            "file. Give files of one kind, without weights; a pair counts as often as it is listed."
        )


def _text_entries(path: str) -> list[str]:
    entries = _read("--data-args-path", path).split()
    if not entries:
        raise DataError(
            f"--data-args-path {path} is empty. It holds what --data-path takes: prefixes, or "
            "weights and prefixes in turn."
        )
    return entries


def _split_entries(path: str) -> dict[str, list[str]]:
    flag = "--per-split-data-args-path"
    try:
        content = json.loads(_read(flag, path))
        lists = {name: content[key] for key, name in _SPLIT_KEYS.items()}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{flag} {path} is not a JSON object with train, valid and test ({error!r}). Each "
            "holds what --data-path takes, as a list or a text, or null."
        ) from error
    entries = {}
    for name, value in lists.items():
        given = value.split() if isinstance(value, str) else value or []
        if not (isinstance(given, list) and all(isinstance(entry, str) for entry in given)):
            raise DataError(
                f"{flag} {path} has {value!r} for --{name.replace('_', '-')}. Give a list of "
                "texts: prefixes, or weights and prefixes in turn."
            )
        entries[name] = given
    return entries


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{flag} {path} cannot be read: {error}. Give the file's path.") from error
