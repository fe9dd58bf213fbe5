"""The command line: Megatron's flags with Switch's defaults, and the ``--switch-*`` flags.

One parser, Megatron's own, is extended and never copied. Defaults become Switch's before parsing
(an explicit flag always wins), and those that depend on other flags or on what is installed are
filled in afterwards by :mod:`megatron_switch.training.arguments.defaults`. The flags of a
``--switch-model`` file are put before those of the command line: types and choices are checked the
same way, and the command line, being later, wins. Nothing here reads or writes Megatron's global
variables.
"""

import json
import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments, parse_args

from megatron_switch.architecture.model_flags import read_model
from megatron_switch.config import FLAG_PREFIX, SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_name
from megatron_switch.flags.known_flags import check_values, fixed_defaults
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.flags.train_flags import SWITCH_GROUP, refuse_unknown

SWITCH_DEFAULTS: Mapping[str, object] = {
    **fixed_defaults(),
    "moe_router_load_balancing_type": "aux_loss",
    "dist_ckpt_optim_fully_reshardable": True,
    "exit_signal_handler": True,
    "create_attention_mask_in_dataloader": False,
    "eval_interval": 1000,
}
"""Defaults of Megatron's flags that hold in every recipe."""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line."""

    args: Namespace
    """Megatron's namespace, not validated yet."""
    explicit: frozenset[str]
    """Attributes of ``args`` whose flag was given on the command line or in the model file."""
    stored: frozenset[str] = frozenset()
    """Attributes whose value was taken from a checkpoint."""

    @property
    def settled(self) -> frozenset[str]:
        """Attributes that no default replaces."""
        return self.explicit | self.stored


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse Megatron's and our flags, with Switch's defaults.

    Args:
        argv: Flags, without the program's name.

    Raises:
        ConfigError: An unknown flag, a malformed value or one out of its range, or a bad
            ``--switch-model`` file.
    """
    seen: set[str] = set()

    def add_switch_flags(parser: ArgumentParser) -> ArgumentParser:
        add_switch_arguments(parser)
        parser.error = _refuse  # type: ignore[method-assign]  # instead of Megatron's 800-line usage
        for action in parser._actions:
            if action.choices and all(isinstance(choice, Enum) for choice in action.choices):
                action.type = _member_named(action.choices)
        flags = {flag: action for action in parser._actions for flag in action.option_strings}
        refuse_unknown(argv)
        _refuse_yaml(argv)
        all_argv = [*_model_argv(argv, flags), *argv]
        seen.update(flags[flag].dest for flag in _flags_in(all_argv))
        parser.set_defaults(**_defaults(all_argv))
        sys.argv[1:] = all_argv  # Megatron gives the parser no other argv
        return parser

    with _command_line_kept():
        try:
            args = parse_args(add_switch_flags)
        except (SyntaxError, MemoryError, OverflowError) as error:
            raise ConfigError(
                "The command line cannot be used: Megatron reads patterns of layers, such as "
                f"--moe-layer-freq [0,1]*12, as Python, and one of them is none: {error}."
            ) from error
    check_values(args)
    return CommandLine(args, frozenset(seen))


def _member_named(members: Iterable[Enum]) -> Callable[[str], Enum]:
    """Return what reads a name as Megatron does, where Megatron ends in a KeyError."""
    by_name = {member.name: member for member in members}

    def read(name: str) -> Enum:
        if name not in by_name:
            raise ArgumentTypeError(f"'{name}' is none of {', '.join(by_name)}")
        return by_name[name]

    return read


def add_switch_arguments(parser: ArgumentParser) -> None:
    """Add the ``--switch-*`` flags to a parser, for help texts and documentation."""
    _SwitchFlags(SwitchConfig).build_group(parser, title=SWITCH_GROUP)


def add_all_arguments(parser: ArgumentParser) -> None:
    """Add Megatron's flags and ours, with the defaults of the recipe ``switch``, for help texts."""
    add_megatron_arguments(parser)
    add_switch_arguments(parser)
    parser.set_defaults(**SWITCH_DEFAULTS, **RECIPES["switch"])


class _SwitchFlags(ArgumentGroupFactory):  # type: ignore[misc]
    """Megatron's flag factory with our prefix."""

    def _build_argparse_kwargs_from_field(self, attribute: Any) -> dict[str, Any]:
        kwargs: dict[str, Any] = super()._build_argparse_kwargs_from_field(attribute)
        kwargs["dest"] = FLAG_PREFIX + attribute.name
        kwargs["arg_names"] = [flag_name(kwargs["dest"])]
        kwargs["help"] = kwargs["help"].replace("%", "%%")
        return kwargs


def _defaults(argv: Sequence[str]) -> dict[str, object]:
    # An unknown recipe is reported by the real parser, which lists the choices.
    recipe = RECIPES.get(_early("--switch-recipe", argv) or "", RECIPES["switch"])
    return {**SWITCH_DEFAULTS, **recipe}


def _early(flag: str, argv: Sequence[str]) -> str | None:
    """Return the value of one flag, before the others can be parsed."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value")
    parser.error = _refuse  # type: ignore[method-assign]
    value: str | None = parser.parse_known_args(list(argv))[0].value
    return value


def _model_argv(argv: Sequence[str], flags: Mapping[str, Action]) -> list[str]:
    """Return the flags of the ``--switch-model`` file as argv."""
    name = _early("--switch-model", argv)
    if name is None:
        return []
    model = read_model(name, flag="--switch-model")
    return [
        word
        for flag, value in ((flag_name(key), value) for key, value in model.items())
        for word in _argv_of_entry(flags[flag], flag, value)
    ]


def _argv_of_entry(action: Action, flag: str, value: object) -> list[str]:
    """Return one entry of a model file as it would stand on a command line."""
    takes_value = action.nargs != 0
    if value is None or (value is False and not takes_value):  # as it is by default
        return []
    if isinstance(value, bool) == takes_value:
        rule = "takes a value" if takes_value else "is on or off, so true or false"
        raise ConfigError(f"--switch-model: {flag} {rule}, got {json.dumps(value)}.")
    if not takes_value:
        return [flag]
    if isinstance(value, list) and action.nargs is not None:
        return [flag, *map(str, value)]
    # A list as one word is how --moe-layer-freq takes its pattern; it knows no space.
    text = str(value).replace(" ", "") if isinstance(value, list) else str(value)
    return [f"{flag}={text}"]


def _flags_in(argv: Sequence[str]) -> list[str]:
    return [word.split("=", 1)[0] for word in argv if word.startswith("--")]


def _refuse_yaml(argv: Sequence[str]) -> None:
    if "--yaml-cfg" in _flags_in(argv):
        raise ConfigError(
            "--yaml-cfg replaces the whole command line, Switch's flags included, and cannot "
            "be used here. Give the model's flags in a JSON file to --switch-model."
        )


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"The command line cannot be used: {message}.")


@contextmanager
def _command_line_kept() -> Iterator[None]:
    """Restore ``sys.argv``, which Megatron's parser reads, at the end of the block."""
    saved = sys.argv
    sys.argv = saved[:1]
    try:
        yield
    finally:
        sys.argv = saved
