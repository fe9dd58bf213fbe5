"""Values of a ``config.json``, each of the kind and size that a model needs.

A configuration is written by others, edited by hand and cut off by full disks. What it says is
taken only where it is what the format says: a number is no text, a size is at least one, ``null``
is the same as nothing. All else is refused with file, name, value and what is expected, instead of
being turned into something that was not meant.
"""

import math
from collections.abc import Mapping
from typing import Any

from megatron_switch.errors import CheckpointError


class ConfigFields:
    """Reads one configuration, for a model of one type."""

    def __init__(self, config: Mapping[str, Any], where: str, model_type: str) -> None:
        """Take a configuration.

        Args:
            config: Content of the file.
            where: The file, for messages.
            model_type: What the values are needed for, for messages.
        """
        self._config = config
        self._where = where
        self._model_type = model_type

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number, at least ``least``."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(name, value, f"a whole number, {least} or more")
        return value

    def divisor(self, name: str, default: int, *, of: int, what: str) -> int:
        """Return a whole number that divides another one, called ``what`` in the message."""
        value = self.integer(name, default)
        if of % value:
            raise self._wrong(name, value, f"a divisor of its {of} {what}")
        return value

    def number(self, name: str, default: float | None = None, *, positive: bool = False) -> float:
        """Return a finite number that is not negative; ``positive`` excludes zero as well."""
        value = self._value(name, default)
        expected = "a number above 0" if positive else "a number, 0 or more"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, value, expected)
        if not math.isfinite(value) or value < 0 or (positive and not value):
            raise self._wrong(name, value, expected)
        return float(value)

    def fraction(self, name: str, default: float) -> float:
        """Return a number from 0 up to, but not including, 1: the rate of a dropout."""
        value = self.number(name, default)
        if value >= 1:
            raise self._wrong(name, value, "a number from 0 to less than 1")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """Return one of several words."""
        value = self._value(name, default)
        if value not in allowed:
            raise self._wrong(name, value, f"one of {', '.join(allowed)}")
        return str(value)

    def layers(self, name: str, depth: int) -> tuple[int, ...]:
        """Return numbers of layers, counted from 0, each once; none where there is no such name."""
        value = self._value(name, [])
        known = range(depth)
        if (
            not isinstance(value, list)
            or any(type(each) is not int or each not in known for each in value)
            or len(set(value)) != len(value)
        ):
            raise self._wrong(name, value, f"a list of layers from 0 to {depth - 1}, each once")
        return tuple(value)

    def inner(self, name: str) -> "ConfigFields":
        """Return the fields of an object within the configuration; empty where there is none."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object of names and values")
        return ConfigFields(value, f"{self._where}, {name}", self._model_type)

    def has(self, name: str) -> bool:
        """Whether there is a value."""
        return self._config.get(name) is not None

    def _value(self, name: str, default: Any) -> Any:
        value = self._config.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(
                f"{self._where} has no {name}, which a {self._model_type} model needs."
            )
        return default

    def _wrong(self, name: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where}: {name} is {value!r:.60}, but a {self._model_type} model needs "
            f"{expected}. Correct the file, or take the one that belongs to the weights."
        )
