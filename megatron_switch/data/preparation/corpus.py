"""Which files make up a corpus, and in which order.

The order is that of the documents in the result, and so decides what Megatron's ``--split`` puts
into training, validation and test: inputs in the order in which they were given, files of a folder
sorted by name, level by level. A file that is reached twice is read once, at its first place.

In a folder, files of unknown suffix and names that start with a dot are ignored. An empty file in a
folder is left out and counted; an empty file that was named is an error, like every other bad file.
The running Python's standard library (:func:`standard_library`) is a corpus that every machine has.
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_switch.data.preparation.input_file import (
    KNOWN_NAMES,
    InputFile,
    head_fault,
    name_kind,
)
from megatron_switch.errors import ConfigError, DataError

SKIP_FLAG = "--skip-bad-input"

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
_LIBRARY_TESTS = frozenset({"test", "tests", "idle_test"})
_FAULTS_SHOWN = 5


@dataclass(frozen=True)
class Corpus:
    """The files to read.

    Attributes:
        files: In the order of their documents.
        empty: Number of empty files that were found in folders and left out.
        faults: One sentence for each bad file that was left out.
        by_flag: How many of them are an error without ``--skip-bad-input``.
    """

    files: tuple[InputFile, ...]
    empty: int
    faults: tuple[str, ...]
    by_flag: int


def find_corpus(
    inputs: Sequence[Path],
    *,
    library: Path | None = None,
    library_tests: bool = False,
    text_key: str = "text",
    skip_bad: bool = False,
    leave_out: Path | None = None,
) -> Corpus:
    """Return the files behind the inputs, each one looked at.

    Args:
        inputs: Files and folders.
        library: Root of a standard library to add, before the inputs.
        library_tests: Whether to take the library's tests too.
        text_key: Column that a Parquet file must have, ``--text-key``.
        skip_bad: Leave bad files out instead of stopping, ``--skip-bad-input``.
        leave_out: Folder whose content is never input: where the output goes.

    Raises:
        ConfigError: There is no input, or Parquet cannot be read here.
        DataError: An input is missing, unreadable, empty or binary, or no file holds text.
    """
    if not inputs and library is None:
        raise ConfigError(
            "There is no text to prepare: name files or folders, or give --stdlib to take the "
            "running Python's standard library."
        )
    found: dict[Path, InputFile] = {}
    named: set[Path] = set()
    faults: list[str] = []
    if library is not None:
        for path in standard_library(library, tests=library_tests):
            _add(found, faults, path, optional=True)
    for entry in inputs:
        if os.path.isdir(entry):
            paths = list(_files_below(entry, leave_out=leave_out))
            if not paths:
                raise DataError(f"Folder {entry} holds no file named {KNOWN_NAMES}.")
        elif not os.path.lexists(entry):
            raise DataError(f"Input {entry} does not exist.")
        elif name_kind(entry) is None:
            raise DataError(
                f"The name of input {entry} does not say what is in it: it must end in "
                f"{KNOWN_NAMES}. Rename the file or link to it with such a name."
            )
        else:
            paths = [entry]
            named.add(entry.absolute())
        for path in paths:
            _add(found, faults, path)
    return _without_bad(found, named, faults, text_key=text_key, skip_bad=skip_bad)


def standard_library(root: Path, *, tests: bool = False) -> list[Path]:
    """Return the Python files of a standard library, sorted, without installed packages.

    Args:
        root: Its folder, :func:`library_root` for the running Python.
        tests: Whether to take its tests, which are larger than the library itself.

    Raises:
        DataError: There is no Python file below ``root``.
    """
    unwanted = _NOT_LIBRARY if tests else _NOT_LIBRARY | _LIBRARY_TESTS
    paths = [path for path in _files_below(root, unwanted=unwanted) if path.suffix == ".py"]
    if not paths:
        raise DataError(
            f"The standard library in {root} comes without its sources, so --stdlib has nothing "
            "to take. Name files or folders with text instead."
        )
    return paths


def library_root() -> Path:
    """Return where the running Python keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def first_of(faults: Sequence[str]) -> str:
    """Return the first few of many sentences, and how many more there are."""
    more = len(faults) - _FAULTS_SHOWN
    return "; ".join(faults[:_FAULTS_SHOWN]) + (f"; and {more:,} more" if more > 0 else "")


def _files_below(
    folder: Path, *, unwanted: frozenset[str] = frozenset(), leave_out: Path | None = None
) -> Iterator[Path]:
    """Yield the files of known name below a folder, in sorted order at every level."""
    skipped = leave_out.resolve() if leave_out is not None else None
    try:
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"Folder {folder} cannot be read ({error.strerror}). Change its permissions, or name "
            "the files and folders beside it one by one."
        ) from error
    for entry in ordered:
        path = Path(entry.path)
        if entry.name.startswith(".") or entry.name in unwanted:
            continue
        # Links to folders are not followed: they may form a cycle.
        if entry.is_dir(follow_symlinks=False):
            if path.resolve() != skipped:
                yield from _files_below(path, unwanted=unwanted, leave_out=leave_out)
        elif name_kind(path) is not None and not os.path.isdir(path):  # False for a broken link
            yield path


def _add(
    found: dict[Path, InputFile], faults: list[str], path: Path, *, optional: bool = False
) -> None:
    """Add a file under its real path, so that a second path to it adds nothing."""
    try:
        # Before resolve(), which raises an error that is no OSError for a cycle of links.
        file = InputFile.at(path.absolute(), optional=optional)
    except OSError as error:
        faults.append(f"{path} cannot be read ({error.strerror})")
    else:
        found.setdefault(path.resolve(), file)


def _without_bad(
    found: dict[Path, InputFile],
    named: set[Path],
    faults: list[str],
    *,
    text_key: str,
    skip_bad: bool,
) -> Corpus:
    files: list[InputFile] = []
    left_out = list(faults)
    empty = 0
    for file in found.values():
        fault = head_fault(file, text_key=text_key)
        if not fault:
            files.append(file)
        elif fault == "is empty" and file.path not in named:
            empty += 1
        else:
            left_out.append(f"{file.path} {fault}")
            if not file.optional:
                faults.append(left_out[-1])
    if faults and not skip_bad:
        raise DataError(
            f"{len(faults):,} input file{'s' * (len(faults) > 1)} cannot be used: "
            f"{first_of(faults)}. Fix or remove these files, or give {SKIP_FLAG} to leave them out."
        )
    if not files:
        detail = f" {first_of(left_out)}." if left_out else f" Its {empty:,} files are empty."
        raise DataError(f"There is no text in the input.{detail}")
    return Corpus(tuple(files), empty, tuple(left_out), len(faults))
