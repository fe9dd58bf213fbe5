"""JSON files that users write, read strictly: a mistake is told with file, line and key.

Nothing is guessed and nothing skipped. A key that nobody asked for is an error too, because a
misspelt key would otherwise mean its default.
"""

import difflib
import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron_switch.errors import ConfigError

_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


class JsonFile:
    """An object in a JSON file, or in one of its objects."""

    def __init__(self, path: Path, text: str, values: dict[str, Any], trail: tuple[str, ...] = ()):
        """Hold ``values``, found at ``trail`` in the file; see :meth:`read`."""
        self.path, self.values, self.trail = path, values, trail
        self.text = text

    @classmethod
    def read(cls, path: Path, what: str) -> "JsonFile":
        """Read a file that holds one object.

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
        try:
            values = json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"The {what} {path} is not JSON: line {error.lineno}, column {error.colno}: "
                f"{error.msg}."
            ) from error
        except RecursionError as error:
            raise ConfigError(f"The {what} {path} is nested too deeply to be one.") from error
        except _RepeatedKeyError as error:
            lines = [text[: m.start()].count("\n") + 1 for m in _key(error.key).finditer(text)]
            raise ConfigError(
                f"The {what} {path} names a key twice: '{error.key}', lines "
                f"{' and '.join(map(str, sorted(set(lines))))}. Remove one."
            ) from error
        except ValueError as error:  # a whole number of thousands of digits
            raise ConfigError(f"The {what} {path} holds a number that is none: {error}.") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"The {what} {path} must hold an object, line 1 begins another value."
            )
        return cls(path, text, values)

    def where(self, key: str) -> str:
        """Return file, line and full name of a key, for messages."""
        place = 0
        for part in (*self.trail, key):
            match = _key(part).search(self.text, place)
            place = match.start() if match else place
        line = self.text[:place].count("\n") + 1
        return f"{self.path}, line {line}, key '{'.'.join((*self.trail, key))}'"

    def refuse(self, key: str, problem: str) -> ConfigError:
        """Return the error for one key."""
        return ConfigError(f"{self.where(key)}: {problem}")

    def only(self, known: Collection[str]) -> None:
        """Refuse keys that are not in ``known``.

        Raises:
            ConfigError: With the nearest known name.
        """
        for key in self.values:
            if key not in known:
                close = difflib.get_close_matches(key, list(known), n=1)
                hint = f"Did you mean '{close[0]}'?" if close else f"Known are {_listed(known)}."
                raise self.refuse(key, f"there is no such key. {hint}")

    def get(self, key: str, kind: type, default: Any = None, *, least: float | None = None) -> Any:
        """Return a value of the given kind, or ``default`` where the key is absent.

        Args:
            key: Name of the value.
            kind: int, float, str, bool, dict or list; a whole number passes for a float.
            default: What absence means; None makes the key compulsory.
            least: Least value allowed.

        Raises:
            ConfigError: If a compulsory key is absent, or the value is of another kind or too
                small.
        """
        if key not in self.values:
            if default is None:
                inside = f" in '{'.'.join(self.trail)}'" if self.trail else ""
                raise ConfigError(
                    f"{self.path} lacks the key '{key}'{inside}, {_KINDS[kind]}. Add it."
                )
            return default
        value = self.values[key]
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            raise self.refuse(key, f"expected {_KINDS[kind]}, found {json.dumps(value)}.")
        if kind is float and not math.isfinite(value):
            raise self.refuse(key, f"must be a finite number, found {value}.")
        if least is not None and value < least:
            raise self.refuse(key, f"must be at least {least:g}, found {value:g}.")
        return float(value) if kind is float else value

    def inner(self, key: str) -> "JsonFile":
        """Return the object under a key, empty where there is none."""
        values = self.get(key, dict, {})
        return JsonFile(self.path, self.text, values, (*self.trail, key))


class _RepeatedKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _RepeatedKeyError(key)
        values[key] = value
    return values


def _key(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(json.dumps(name)) + r"\s*:")


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
