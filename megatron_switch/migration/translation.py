"""Flags that mean the same, and notes on what has no equal."""

from dataclasses import dataclass, field
from typing import Literal

from megatron_switch.flags.argv import argv_of


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
        flags: Values by flag; True for a flag without one.
        notes: What to know.
    """

    flags: dict[str, str | Literal[True]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def set(self, flag: str, value: object = True) -> None:
        """Add a flag, or replace its value."""
        self.flags[flag] = True if value is True else _text(value)

    def note(self, setting: str, text: str) -> None:
        """Add a note."""
        self.notes.append(Note(setting, text))

    @property
    def argv(self) -> list[str]:
        """The flags as words of a command line."""
        return argv_of(self.flags)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
