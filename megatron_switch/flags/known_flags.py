"""Every flag of which something is known, ours and Megatron's, and the checks of single values.

The checks are made on values, not on which flags were typed, because values also come from
``--switch-model`` files and checkpoints; they are made on the parsed namespace, before Megatron
validates and changes it. Megatron checks some numbers late, with an assertion or a division by
zero, and some never: a capacity factor that is not a number trains until the first evaluation.
"""

from argparse import Namespace
from collections.abc import Collection, Mapping
from types import MappingProxyType

from megatron_switch.config import switch_traits
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_name
from megatron_switch.flags.megatron_flags import MEGATRON_FLAGS
from megatron_switch.flags.traits import Condition, MegatronFlag, OnResume, Traits, check_ranges

KNOWN_FLAGS: Mapping[str, Traits] = MappingProxyType({**switch_traits(), **MEGATRON_FLAGS})
"""Traits by attribute of Megatron's namespace."""

_LISTS_OF_ONE = ("moe_aux_loss_coeff", "moe_router_load_balancing_type")
"""Flags that take several values in Megatron, which adds up several balancing losses."""


def flags_with(on_resume: OnResume) -> list[str]:
    """Return the attributes of the flags whose other value means this when a run is resumed."""
    return [name for name, traits in KNOWN_FLAGS.items() if traits.on_resume == on_resume]


def shown_flag(attribute: str) -> str:
    """Return how messages name the flag that sets an attribute."""
    row = MEGATRON_FLAGS.get(attribute)
    return row.shown if row is not None and row.shown else flag_name(attribute)


def fixed_defaults() -> dict[str, object]:
    """Return the only value, by attribute, of each flag of Megatron that Switch fixes."""
    return {name: row.accepted[0] for name, row in MEGATRON_FLAGS.items() if row.kind == "fixed"}


def check_values(args: Namespace) -> None:
    """Refuse a number that its flag cannot have.

    Args:
        args: Parsed command line, before anything is derived from it.

    Raises:
        ConfigError: Naming all such flags.
    """
    check_ranges(KNOWN_FLAGS, vars(args))


def check_megatron_flags(args: Namespace) -> None:
    """Refuse values of Megatron's flags that a Switch layer could not follow.

    Without ``--num-experts`` the model is dense, and nothing is checked.

    Args:
        args: Parsed command line, before Megatron's own validation.

    Raises:
        ConfigError: A flag has a value that is not accepted; all such flags are named.
    """
    if not args.num_experts:
        return
    problems = [
        problem
        for name, row in MEGATRON_FLAGS.items()
        if row.reason and (problem := _problem(name, row, getattr(args, name)))
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def flags_without_effect(
    explicit: Collection[str], failed: Mapping[Condition, str]
) -> dict[str, str]:
    """Return the flags that were given although they have no effect, with the reason.

    Args:
        explicit: Attributes whose flag stood on the command line.
        failed: Conditions that do not hold, with the reason in words.
    """
    idle = {}
    for name, traits in KNOWN_FLAGS.items():
        reasons = [failed[condition] for condition in traits.needs if condition in failed]
        if isinstance(traits, MegatronFlag) and traits.kind == "harmless":
            reasons.append(traits.reason)
        if reasons and name in explicit:
            idle[flag_name(name)] = reasons[0]
    return idle


def _problem(name: str, row: MegatronFlag, value: object) -> str:
    flag = flag_name(name)
    if name in _LISTS_OF_ONE and isinstance(value, list):
        if len(value) != 1:
            given = " ".join(map(str, value))
            return f"{flag} takes one value with Switch, got {given}. {row.reason}"
        value = value[0]
    if not row.accepted or any(value == wanted for wanted in row.accepted):
        return ""
    if row.accepted[0] is None or row.accepted[0] is False:
        given = "" if value is True else f" {value}"
        return f"{flag}{given} cannot be used with Switch layers. {row.reason} Leave it out."
    allowed = " or ".join(map(str, row.accepted))
    return f"{flag} must be {allowed} with Switch layers, got {value}. {row.reason}"
