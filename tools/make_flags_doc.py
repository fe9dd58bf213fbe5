"""Write ``docs/flags.md`` from the code: our flags, the recipes, and how Megatron's are handled.

All flags go to ``train_flags.json`` too, for commands that do without Megatron. Run it
after a flag, a recipe or a row of :mod:`megatron_switch.flags.megatron_flags` has changed, or
another Megatron is used; tests compare both files with what this program would write.
"""

import argparse
import json
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from megatron_switch.config import switch_traits
from megatron_switch.flags.argv import attribute_of, flag_name
from megatron_switch.flags.known_flags import fixed_defaults
from megatron_switch.flags.megatron_flags import MEGATRON_FLAGS
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.flags.train_flags import FLAGS_FILE, SWITCH_GROUP, flag_names
from megatron_switch.flags.traits import MegatronFlag
from megatron_switch.training.arguments.parser import (
    SWITCH_DEFAULTS,
    add_all_arguments,
    add_switch_arguments,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"

TEXT = """\
# Flags

Written by `python tools/make_flags_doc.py`; do not edit.

`megatron-switch train` takes every flag of Megatron-Core 0.19.2, and those of the first table. A
flag on the command line wins over `--switch-model`, which wins over `--switch-recipe`.

## Flags of megatron-switch

*On resume* compares with the checkpoint: a value that *may change*, one that *must agree* unless
`--switch-override-checkpoint` is given, and one that makes *another model*, always an error.

{switch}

## What a recipe sets

Defaults only: a flag that is given wins. `none` leaves the flag unset.

{recipes}

## Other defaults of Megatron's flags

{defaults}

Megatron has no flag that would turn off again those that are on here; both cost nothing that is
worth saving. Defaults that follow from the device and from what is installed (Transformer Engine,
Apex) are reported in one line when training starts.

## Megatron's flags for mixtures of experts

*honoured*: means what it means in Megatron, or what its note says. *fixed*: only the value shown is
accepted, and it is the default. *refused*: an error when set. *harmless*: tunes something that a
Switch layer does not have; accepted with a warning. None of this holds for a dense model, that is,
without `--num-experts`.

{megatron}
"""


_ON_RESUME = {"free": "may change", "model": "another model", "overridable": "must agree"}


def page() -> str:
    """Return the whole page."""
    return TEXT.format(
        switch=_table(("flag", "values", "default", "on resume", "meaning"), _switch_rows()),
        recipes=_table(("flag", *RECIPES), _recipe_rows()),
        defaults=_table(("flag", "default"), _default_rows()),
        megatron=_table(("flag", "with Switch", "note"), _megatron_rows()),
    )


def flags_file() -> str:
    """Return all flags by group as arguments of argparse, one flag on a line of JSON.

    The help texts are those of our own flags; Megatron's are its authors'.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_all_arguments(parser)
    groups = []
    for group in parser._action_groups:
        lines = [
            f"{json.dumps(action.option_strings[0])}: {json.dumps(options)}"
            for action in group._group_actions
            for options in [_argparse_arguments(action, is_ours=group.title == SWITCH_GROUP)]
        ]
        if lines:
            groups.append(f"{json.dumps(group.title)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(groups) + "\n}\n"


def _argparse_arguments(action: argparse.Action, *, is_ours: bool) -> dict[str, object]:
    """Return how to add a flag, without what argparse would do by itself."""
    name, *also = action.option_strings
    kind = getattr(action.type, "__name__", "")
    found: dict[str, object] = {
        "also": also,
        "dest": "" if action.dest == attribute_of(name) else action.dest,
        "action": "",
        "nargs": action.nargs,
        "type": kind if kind in ("int", "float") else "",
        "choices": [_plain(choice) for choice in action.choices or ()],
        "default": _plain(action.default),
        "help": action.help if is_ours else None,
        "metavar": action.metavar,
    }
    if action.nargs == 0:
        is_off_switch = isinstance(action, argparse._StoreFalseAction)
        found |= {"action": "store_false" if is_off_switch else "store_true", "nargs": None}
        if action.default is is_off_switch:
            found["default"] = None
    return {key: value for key, value in found.items() if value not in (None, "", [])}


def _plain(value: object) -> object:
    """Return a member of an enumeration as it is typed."""
    return value.name if isinstance(value, Enum) else value


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _switch_rows() -> Iterable[tuple[str, ...]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_switch_arguments(parser)
    for action in parser._actions:
        flag, traits = f"`{action.option_strings[0]}`", switch_traits()[action.dest]
        values = f"{_values(action)}, {traits.range}" if traits.range else _values(action)
        resume = _ON_RESUME[traits.on_resume]
        yield flag, values, _value(action.default), resume, action.help or ""


def _values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "switch"
    kind = getattr(action.type, "__name__", "text")
    values = [str(choice) for choice in action.choices or ()]
    return ", ".join(values) or {"int": "integer", "float": "number"}.get(kind, "text")


def _recipe_rows() -> Iterable[tuple[str, ...]]:
    for name in next(iter(RECIPES.values())):
        values = [_value(recipe[name]) for recipe in RECIPES.values()]
        yield f"`{flag_name(name)}`", *values


def _default_rows() -> Iterable[tuple[str, ...]]:
    flag_attributes = {attribute_of(name) for name in flag_names()}
    for name, value in SWITCH_DEFAULTS.items():
        if name in fixed_defaults():  # those stand in the last table
            continue
        if name not in flag_attributes:  # its flag turns it off
            name, value = f"no_{name}", not value
        yield f"`{flag_name(name)}`", _value(value)


def _megatron_rows() -> Iterable[tuple[str, ...]]:
    for name, row in MEGATRON_FLAGS.items():
        if row.reason:
            yield f"`{flag_name(name)}`", _class(row), row.reason


def _class(row: MegatronFlag) -> str:
    values = "" if row.kind == "refused" else " or ".join(_value(v) for v in row.accepted)
    return f"{row.kind}: {values}" if values else row.kind


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def main() -> None:
    """Write both files; ``--help`` and mistakes write nothing."""
    description = __doc__.partition("\n")[0]
    argparse.ArgumentParser(description=description).parse_args()
    for path, text in ((PAGE, page()), (FLAGS_FILE, flags_file())):
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
