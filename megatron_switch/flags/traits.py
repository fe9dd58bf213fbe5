"""What this program knows of a flag besides its name, type, default and help.

One record holds it for every flag: as metadata of the fields of
:class:`megatron_switch.config.SwitchConfig`, and in the rows of
:data:`megatron_switch.flags.megatron_flags.MEGATRON_FLAGS`. Checks, comparisons with a checkpoint,
notes and documentation read it there, so that a flag is described in one place only.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field
from typing import Any, Literal

from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_name

Condition = Literal[
    "experts",
    "t5",
    "spans",
    "limit",
    "factor",
    "drops",
    "metrics",
    "save",
    "gated",
    "grouped queries",
    "rope scaling",
]
"""What must hold for a flag to have an effect:

experts
    The model has experts (``--num-experts``).
t5
    The model is an encoder-decoder (``--switch-arch t5``).
spans
    The data are prepared text, of which spans are replaced, and not pairs of texts.
limit
    Experts take a limited number of tokens: always in training, in inference with ``--drop``.
factor
    That limit comes from a capacity factor, and not from ``--switch-capacity``.
drops
    Not every capacity factor is negative.
metrics, save
    There is a place for metrics, for checkpoints.
gated, grouped queries, rope scaling
    The model has gated units, grouped queries, scaled rotary frequencies.
"""

OnResume = Literal["free", "model", "overridable", "optimizer", "buffers"]
"""What another value means when a checkpoint is loaded:

free
    May change: it says where, how fast, or on which data a model is trained.
model
    Another model: always an error.
overridable
    Other routing or losses: an error without ``--switch-override-checkpoint``.
optimizer
    Another optimizer: an error while the optimizer's state is loaded.
buffers
    Another order of the optimizer's buffers: an error where its state is stored in that order.
"""


FlagKind = Literal["honoured", "fixed", "refused", "harmless"]
"""How a flag of Megatron is treated where layers have experts:

honoured
    Means with Switch what it means in Megatron, or what its note says.
fixed
    Switch leaves no choice: the default is the accepted value, and any other is an error.
refused
    Asks for something that a Switch layer does not do: setting it is an error.
harmless
    Tunes something that a Switch layer does not have. Accepted, with a warning.
"""


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers that a flag may have; infinities and NaN are in no range."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    other_than: float | None = None
    why: str = ""
    """A sentence on what the bound means."""

    def __contains__(self, value: float) -> bool:
        """Whether a number is allowed."""
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and value != self.other_than
        )

    def __str__(self) -> str:
        """Return the bounds in words."""
        bounds = {
            "at least": self.at_least,
            "above": self.above,
            "at most": self.at_most,
            "below": self.below,
            "other than": self.other_than,
        }
        return " and ".join(
            f"{word} {'2^40' if bound == _MOST else bound}"
            for word, bound in bounds.items()
            if bound is not None
        )

    def problem(self, flag: str, value: object) -> str:
        """Return what is wrong with a flag's value, a number or a list of them; else ``""``."""
        wrong = next((number for number in _numbers(value) if number not in self), None)
        if wrong is None:
            return ""
        finite = "" if math.isfinite(wrong) else "finite and "
        return " ".join(f"{flag} must be {finite}{self}, got {wrong:g}. {self.why}".split())


_MOST = 2**40  # no count has a use for more, and products of larger ones leave 64 bits
COUNT = Range(at_least=1, at_most=_MOST)
COUNT_OR_ZERO = Range(at_least=0, at_most=_MOST)
NOT_NEGATIVE = Range(at_least=0)
POSITIVE = Range(above=0)
SHARE = Range(at_least=0, at_most=1)
BELOW_ONE = Range(at_least=0, below=1)
CAPACITY_FACTOR = Range(
    other_than=0, why="A factor of 0 would drop every token; a negative one drops none."
)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """How a flag is checked, compared and explained."""

    range: Range | None = None
    """Where None, a value of the flag's type is enough."""
    needs: tuple[Condition, ...] = ()
    """Conditions without which it has no effect; the first that fails is named."""
    on_resume: OnResume = "free"
    identity: bool = False
    """Whether another value is another run, with a run folder of its own."""


@dataclass(frozen=True, kw_only=True)
class MegatronFlag(Traits):
    """How this program treats one flag of Megatron."""

    kind: FlagKind = "honoured"
    reason: str = ""
    """Why, or what it means with Switch; a sentence that stands on its own."""
    accepted: tuple[object, ...] = ()
    """The parsed values that are allowed, the default first; empty where all are."""
    stored: bool | None = None
    """Whether a model that is opened from its checkpoint takes the value stored there; None: if it
    is a field of Megatron's ``TransformerConfig``, or another value is another model."""
    shown: str = ""
    """How messages name it, where its flag is not its attribute with dashes."""


def flag(
    default: Any,
    *,
    on_resume: OnResume,
    range: Range | None = None,
    needs: tuple[Condition, ...] = (),
    identity: bool = False,
) -> Any:
    """Return a dataclass field that is a flag with these :class:`Traits`."""
    traits = Traits(range=range, needs=needs, on_resume=on_resume, identity=identity)
    return field(default=default, metadata={"traits": traits})


def traits_of(attribute: Field[Any]) -> Traits:
    """Return the traits of a field that was made by :func:`flag`."""
    traits: Traits = attribute.metadata["traits"]
    return traits


def check_ranges(traits: Mapping[str, Traits], values: Mapping[str, object]) -> None:
    """Refuse numbers that their flags cannot have; a flag without a value is not checked.

    Args:
        traits: Traits by attribute of Megatron's namespace.
        values: Values by attribute; others may be among them.

    Raises:
        ConfigError: Naming all such flags.
    """
    problems = [
        problem
        for name, each in traits.items()
        if each.range is not None
        and (problem := each.range.problem(flag_name(name), values.get(name)))
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _numbers(value: object) -> Iterator[float]:
    """Yield the numbers of a flag that has one, or several; none where it is not set."""
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, int | float) and not isinstance(each, bool):
            yield each
