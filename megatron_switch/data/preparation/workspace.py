"""The output folder of a preparation: unfinished work, results, and the report, which comes last.

    OUTPUT/.preparing/       shards and the trained tokenizer while the work is unfinished
    OUTPUT/corpus.bin .idx   the tokens, in Megatron's format
    OUTPUT/tokenizer.model   the tokenizer, where one was trained
    OUTPUT/prepared.json     the report; it is written last, so the results are complete

An interrupted preparation resumes, if inputs and settings are the same: both are in the
fingerprint, files with size and time of change. Otherwise it starts over. Finished results are
replaced only with ``--overwrite``, and by complete ones.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from megatron_switch.errors import ConfigError, DataError
from megatron_switch.utils.atomic_file import renamed_into_place
from megatron_switch.utils.units import size_text

Start = Literal["new", "resumed", "restarted"]
"""What was found of unfinished work: none, of the same fingerprint, or of another one."""


def fingerprint_of(settings: object) -> str:
    """Return a hash of plain values: the same values, the same preparation."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode("utf-8")).hexdigest()


@dataclass(frozen=True)
class Workspace:
    """Where a preparation works and where its results go.

    Attributes:
        output: Folder of the results, ``--output``.
        fingerprint: Hash of inputs and settings.
    """

    output: Path
    fingerprint: str

    @property
    def folder(self) -> Path:
        """Folder of unfinished work."""
        return self.output / ".preparing"

    @property
    def prefix(self) -> Path:
        """What ``--data-path`` gets: the path of the results without their suffix."""
        return self.output / "corpus"

    @property
    def tokenizer_model(self) -> Path:
        """Where a trained tokenizer goes."""
        return self.output / "tokenizer.model"

    @property
    def report(self) -> Path:
        """The file that is written last."""
        return self.output / "prepared.json"

    @property
    def _state(self) -> Path:
        return self.folder / "state.json"

    @property
    def _results(self) -> tuple[Path, ...]:
        """In the order in which they are removed: without an index, no tokens are found."""
        return (
            self.report,
            self.prefix.with_suffix(".idx"),
            self.prefix.with_suffix(".bin"),
            self.tokenizer_model,
        )

    def finished_report(self) -> dict[str, Any] | None:
        """Return the report of a finished preparation from the same inputs and settings."""
        try:
            report = json.loads(self.report.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        same = isinstance(report, dict) and report.get("fingerprint") == self.fingerprint
        return report if same else None

    def check_output(self, *, overwrite: bool) -> None:
        """Refuse a folder whose content this preparation may not replace.

        Raises:
            ConfigError: Results of another preparation are there, and ``--overwrite`` is not given.
        """
        if self.output.exists() and not self.output.is_dir():
            raise ConfigError(f"--output {self.output} is a file; give a folder.")
        there = [path.name for path in self._results if path.exists()]
        # Without a report, results are from our own work, interrupted while it moved them.
        ours = self.is_resumable() and not self.report.exists()
        if there and not overwrite and not ours:
            raise ConfigError(
                f"--output {self.output} already holds {', '.join(there)}, made from other input "
                "or with other settings. Give another --output, or --overwrite to replace them."
            )

    def is_resumable(self) -> bool:
        """Return whether unfinished work of the same fingerprint is there."""
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
        return isinstance(state, dict) and state.get("fingerprint") == self.fingerprint

    @contextmanager
    def opened(self) -> Iterator[Start]:
        """Lock the folder of unfinished work, emptied of what belongs to another preparation.

        Yields:
            How the work starts.

        Raises:
            ConfigError: Another process is preparing into the same folder.
            OSError: The folder cannot be made.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            held = FileLock(self.folder / "lock", timeout=0).acquire()
        except Timeout as error:
            raise ConfigError(
                f"Another megatron-switch prepare is writing to --output {self.output}. Wait "
                "for it, or give another --output."
            ) from error
        with held:
            start: Start = "new" if not self._state.exists() else "restarted"
            if self.is_resumable():
                start = "resumed"
            else:
                for path in self.folder.iterdir():
                    if path.name != "lock":
                        path.unlink()
                with renamed_into_place(self._state) as stream:
                    json.dump({"fingerprint": self.fingerprint}, stream)
            yield start

    def check_space(self, num_bytes: float) -> None:
        """Refuse work for which the disk has no room.

        Args:
            num_bytes: Bytes that are still to be written, roughly.

        Raises:
            DataError: Less than that is free.
        """
        free = shutil.disk_usage(self.output).free
        if num_bytes > free:
            raise DataError(
                f"Preparing needs about {size_text(num_bytes)} in --output {self.output}, and "
                f"{size_text(free)} are free there. Free some, or give an --output elsewhere."
            )

    def publish(self, report: dict[str, Any]) -> None:
        """Move finished files from the work folder into their places, the report last.

        Args:
            report: Content of ``prepared.json``.

        Raises:
            OSError: The folder cannot be written.
        """
        for path in self._results:
            path.unlink(missing_ok=True)
        for path in reversed(self._results):
            made = self.folder / path.name
            if made.exists():
                made.replace(path)
        with renamed_into_place(self.report) as stream:
            json.dump({**report, "fingerprint": self.fingerprint}, stream, indent=2)
            stream.write("\n")
        shutil.rmtree(self.folder)
