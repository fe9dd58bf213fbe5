"""What other formats call a field of a model: the metadata beside it, and how it is read by it."""

from collections.abc import Mapping
from dataclasses import Field
from types import MappingProxyType
from typing import Any, Literal

from megatron_switch.flags.argv import flag_key
from megatron_switch.flags.known_flags import KNOWN_FLAGS
from megatron_switch.utils.fields import Fields

Family = Literal["gpt", "t5"]
"""Decoder-only models, and encoder-decoders."""

FLOATS = (float, float | None)
"""Types of fields that are numbers."""


def known_as(
    gpt: str = "",
    t5: str = "",
    *,
    flag: str = "",
    off: str = "",
    own: bool = False,
    **bounds: float,
) -> Mapping[str, Any]:
    """Return the metadata of a field: what other formats call it.

    Args:
        gpt: Key in the ``config.json`` of a decoder-only model; none where it has none.
        t5: Key in that of an encoder-decoder; likewise.
        flag: Megatron's flag, where it is not the field's name.
        off: The flag that turns the field off, where it is on by default.
        own: Whether only this project's own format of a decoder-only model (``switch_gpt``) has
            the key; the stock ones all compute the same.
        **bounds: What a number has to be beside its flag's range, as :meth:`Fields.number` takes
            it.
    """
    return {"gpt": gpt, "t5": t5, "flag": flag, "off": off, "own": own, "bounds": bounds}


def is_of_experts(each: Field[Any]) -> bool:
    """Return whether a field says something only of a model that has experts."""
    return each.name.startswith(("num_experts", "moe_", "switch_expert_"))


def flag_of(each: Field[Any]) -> str:
    """Return Megatron's flag of a field, without dashes."""
    return str(each.metadata["flag"] or flag_key(each.name))


def read_field(
    each: Field[Any], source: Fields, key: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Return the value of a field from flags or from a configuration, in its flag's range.

    Args:
        each: The field.
        source: Where it is read.
        key: What it is called there.
        defaults: Values by field, where the key may be absent.

    Raises:
        SwitchError: As the source does, where there is no value, or a wrong one.
    """
    value = _of_its_type(each, source, key, defaults)
    limits = KNOWN_FLAGS[each.name].range if each.name in KNOWN_FLAGS else None
    if limits is not None and limits.problem(key, value):
        raise source.wrong(key, f"a finite number, {limits}")
    return value


def _of_its_type(each: Field[Any], source: Fields, key: str, defaults: Mapping[str, Any]) -> Any:
    default = {"default": defaults[each.name]} if each.name in defaults else {}
    if each.type is bool:
        return source.flag(key, **default)
    if each.type is int:
        return source.integer(key, **default)
    if each.type in FLOATS:
        return source.number(key, **default, **each.metadata["bounds"])
    return source.text(key, **default)
