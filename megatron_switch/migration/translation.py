"""Flags that mean the same, and notes on what has no equal."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Note:
    """Why a setting has no flag, or what its flag does otherwise.

    Attributes:
        setting: Name of the setting where it was found.
        text: A sentence or two.
    """

    setting: str
    text: str


@dataclass
class Translation:
    """Flags and notes, in the order in which settings were read.

    Attributes:
        flags: Values by flag; None for a flag without one.
        notes: What to know.
    """

    flags: dict[str, str | None] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def set(self, flag: str, value: object = None) -> None:
        """Add a flag, or replace its value."""
        self.flags[flag] = None if value is None else _text(value)

    def note(self, setting: str, text: str) -> None:
        """Add a note."""
        self.notes.append(Note(setting, text))

    def words(self) -> list[str]:
        """Return the flags as words of a command line."""
        return [word for pair in self.flags.items() for word in _present(pair)]


def _present(words: Iterable[str | None]) -> list[str]:
    return [word for word in words if word is not None]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
