"""Named values that users or other programs wrote, each of the kind and size that is expected.

Nothing is guessed and nothing skipped: a number is no text, and what is not as expected is refused
with its file, key and line, the value and what is expected. A key that no caller read can be
refused too (:meth:`Fields.only`), because a misspelt key would otherwise mean its default.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_switch.errors import ConfigError, SwitchError

_REQUIRED: Any = object()
_MOST_SHOWN = 60  # characters of a wrong value


@dataclass(frozen=True)
class Source:
    """Where values stand, for messages.

    Attributes:
        name: The file.
        text: Its content, in which lines are counted; empty where it is not at hand.
        error: The error of a wrong or missing value.
        advice: The way out of one.
        null_is_absent: Whether ``null`` is the same as no value.
    """

    name: str
    text: str = ""
    error: type[SwitchError] = ConfigError
    advice: str = ""
    null_is_absent: bool = False


class Fields:
    """Reads one object of named values.

    Every reader of a value returns its default where there is none, and without a default refuses
    its absence. Readers raise the error of the :class:`Source`.
    """

    def __init__(
        self, values: Mapping[str, Any], source: Source, trail: tuple[str, ...] = ()
    ) -> None:
        """Hold ``values``, found under the keys of ``trail``."""
        self.values, self.source, self.trail = values, source, trail
        self._asked: set[str] = set()

    @classmethod
    def read(cls, path: Path, what: str) -> "Fields":
        """Read a JSON file that holds one object.

        Args:
            path: The file.
            what: What the file is, for messages: ``hardware file``.

        Raises:
            ConfigError: If it is missing, no JSON, or no object.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The {what} {path} cannot be read: {error}.") from error
        return cls(_parsed(text, f"The {what} {path}"), Source(str(path), text))

    def has(self, name: str) -> bool:
        """Return whether there is a value."""
        self._asked.add(name)
        value = self.values.get(name, _REQUIRED)
        return value is not _REQUIRED and not (value is None and self.source.null_is_absent)

    def integer[D](self, name: str, default: D = _REQUIRED, *, least: int = 1) -> int | D:
        """Return a whole number, at least ``least``."""
        expected = f"a whole number, {least} or more"
        return self._read(name, default, int, expected, lambda value: value >= least)

    def divisor(self, name: str, default: int, *, of: int, what: str) -> int:
        """Return a whole number that divides another one, called ``what`` in the message."""
        expected = f"a divisor of its {of} {what}"
        return self._read(name, default, int, expected, lambda value: value > 0 and of % value == 0)

    def number[D](
        self,
        name: str,
        default: D = _REQUIRED,
        *,
        least: float = -math.inf,
        above: float = -math.inf,
        below: float = math.inf,
    ) -> float | D:
        """Return a finite number between bounds, of which only ``least`` is allowed itself."""
        bounds = [f"{least:g} or more"] * (least > -math.inf)
        bounds += [f"above {above:g}"] * (above > -math.inf)
        bounds += [f"below {below:g}"] * (below < math.inf)
        expected = ", ".join(["a finite number", *bounds])
        return self._read(
            name, default, float, expected, lambda value: least <= value < below and value > above
        )

    def text[D](self, name: str, default: D = _REQUIRED) -> str | D:
        """Return a text."""
        return self._read(name, default, str, "a text")

    def choice[D](self, name: str, allowed: Collection[str], default: D = _REQUIRED) -> str | D:
        """Return one of several words."""
        expected = f"one of {', '.join(allowed)}"
        return self._read(name, default, str, expected, lambda value: value in allowed)

    def flag[D](self, name: str, default: D = _REQUIRED) -> bool | D:
        """Return true or false."""
        return self._read(name, default, bool, "true or false")

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        expected = "a list of texts"
        return self._read(
            name, _REQUIRED, list, expected, lambda value: all(type(each) is str for each in value)
        )

    def indices(self, name: str, count: int) -> tuple[int, ...]:
        """Return whole numbers from 0 to below ``count``, each once; none where there is no key."""
        expected = f"a list of whole numbers from 0 to {count - 1}, each once"
        found: list[Any] = self._read(
            name,
            [],
            list,
            expected,
            lambda value: (
                all(type(each) is int and 0 <= each < count for each in value)
                and len(set(value)) == len(value)
            ),
        )
        return tuple(found)

    def inner(self, name: str) -> "Fields":
        """Return the object under a key, empty where there is none."""
        values = self._read(name, {}, dict, "an object")
        return Fields(values, self.source, (*self.trail, name))

    def one_of(self, name: str, allowed: Collection[Any]) -> bool:
        """Return whether a value of any kind is among some; no value is None."""
        return (self.values[name] if self.has(name) else None) in allowed

    def unread(self) -> dict[str, Any]:
        """Return the values that no caller has asked for, by key."""
        return {
            name: value
            for name, value in self.values.items()
            if name not in self._asked and not (value is None and self.source.null_is_absent)
        }

    def objects(self, name: str) -> list["Fields"]:
        """Return the objects of a list."""
        expected = "a list of objects"
        found = self._read(
            name, _REQUIRED, list, expected, lambda value: all(type(each) is dict for each in value)
        )
        return [
            Fields(values, self.source, (*self.trail, name, str(number)))
            for number, values in enumerate(found)
        ]

    def only(self, known: Collection[str]) -> None:
        """Refuse keys that are not in ``known``, with the nearest name that is."""
        for key in self.values:
            if key not in known:
                close = difflib.get_close_matches(key, list(known), n=1)
                listed = ", ".join(sorted(known))
                hint = f"Did you mean '{close[0]}'?" if close else f"Known are {listed}."
                raise self.error(key, f"there is no such key. {hint}")

    def where(self, name: str) -> str:
        """Return file, line where it is known, and full name of a key, for messages."""
        keys = (*self.trail, name)
        full = f"key '{'.'.join(keys)}'"
        text, place = self.source.text, 0
        if not text:
            return f"{self.source.name}, {full}"
        for key in keys:
            match = _key(key).search(text, place)
            place = match.start() if match else place
        line = text[:place].count("\n") + 1
        return f"{self.source.name}, line {line}, {full}"

    def error(self, name: str, problem: str) -> SwitchError:
        """Return the error for one key; ``problem`` says the rule, the value and the way out."""
        return self.source.error(f"{self.where(name)}: {problem}")

    def wrong(self, name: str, expected: str) -> SwitchError:
        """Return the error for a value that is not as expected."""
        shown = json.dumps(self.values[name])
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        return self.error(name, f"expected {expected}, found {shown}. {self.source.advice}".strip())

    def _read[T, D](
        self,
        name: str,
        default: D,
        kind: type[T],
        expected: str,
        allowed: Callable[[T], bool] = lambda value: True,
    ) -> T | D:
        if not self.has(name):
            if default is _REQUIRED:
                raise self._missing(name, expected)
            return default
        value: T | None = self._as(kind, self.values[name])
        if value is None or not allowed(value):
            raise self.wrong(name, expected)
        return value

    def _as(self, kind: type, value: Any) -> Any:
        """Return a value of one kind; None where it is of another."""
        if kind is float and type(value) in (int, float):
            return float(value) if math.isfinite(value) else None
        return value if type(value) is kind else None

    def _missing(self, name: str, expected: str) -> SwitchError:
        inside = f" in '{'.'.join(self.trail)}'" if self.trail else ""
        advice = self.source.advice or "Add it."
        return self.source.error(
            f"{self.source.name} lacks the key '{name}'{inside}, {expected}. {advice}"
        )


class _RepeatedKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _parsed(text: str, what: str) -> dict[str, Any]:
    """Return the object that a JSON text holds."""
    try:
        values = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{what} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}."
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{what} is nested too deeply to be one.") from error
    except _RepeatedKeyError as error:
        lines = [text[: m.start()].count("\n") + 1 for m in _key(error.key).finditer(text)]
        raise ConfigError(
            f"{what} names a key twice: '{error.key}', lines "
            f"{' and '.join(map(str, sorted(set(lines))))}. Remove one."
        ) from error
    except ValueError as error:  # a whole number of thousands of digits
        raise ConfigError(f"{what} holds a number that is none: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{what} must hold an object, line 1 begins another value.")
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _RepeatedKeyError(key)
        values[key] = value
    return values


def _key(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(json.dumps(name)) + r"\s*:")
