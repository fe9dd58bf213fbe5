"""Typed values of flags that Megatron's parser has not read: a login node has no Megatron.

They come as words of a command line or from a model file, so that ``8`` and ``"8"`` are the same.
"""

import math
from collections.abc import Mapping
from typing import Any

from megatron_switch.errors import ConfigError
from megatron_switch.utils.fields import Fields, Source


class FlagValues(Fields):
    """Values of flags by name without the leading dashes; a flag without a value is True."""

    def __init__(self, flags: Mapping[str, object]) -> None:
        """Hold flags; one whose value is None is not given."""
        super().__init__(flags, Source("The command line", null_is_absent=True))

    def on(self, name: str) -> bool:
        """Return whether a flag that takes no value is given."""
        return self.flag(name, False)

    def error(self, name: str, problem: str) -> ConfigError:
        """Return the error for one flag."""
        return ConfigError(f"--{name} {problem}")

    def _as(self, kind: type, value: Any) -> Any:
        if kind is bool:
            return value is not False
        text = "" if isinstance(value, bool) else str(value)
        if kind is int:
            return int(text) if text.isdecimal() else None
        if kind is float:
            try:
                return float(text) if math.isfinite(float(text)) else None
            except ValueError:
                return None
        return str(value)

    def _missing(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"The model's size needs --{name}, {expected}, which was not given.")

    def wrong(self, name: str, expected: str) -> ConfigError:
        """Return the error for a value that is not as expected."""
        return self.error(name, f"takes {expected}, got {self.values[name]}.")
