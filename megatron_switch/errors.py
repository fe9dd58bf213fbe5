"""The errors that a user of megatron-switch can cause, and nothing else.

A message has three parts: the rule that was broken, the values that broke it, and the way out with
the name of the flag to turn. States that only our own code can cause are asserted instead.
"""


class SwitchError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(SwitchError, ValueError):
    """A flag, or a combination of flags, that cannot work."""


class LayoutError(ConfigError):
    """Parallel sizes that do not form a legal rank grid."""


class CheckpointError(SwitchError):
    """A checkpoint that is missing, incomplete, damaged or of another model."""


class DataError(SwitchError):
    """Training text, tokenizer or dataset files that cannot be used."""


class NumericError(SwitchError, ArithmeticError):
    """A non-finite value (NaN or infinity) where a training step would use it."""


class OneRankNumericError(NumericError):
    """A non-finite value in data of one rank only; the other ranks do not report it."""


class UpstreamError(SwitchError):
    """The installed Megatron-Core or torch is not what this code was checked against."""
