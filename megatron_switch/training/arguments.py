"""The command line: Megatron's flags with Switch's defaults, and the ``--switch-*`` flags.

One parser, Megatron's own, is extended and never copied. Defaults become Switch's before parsing
(an explicit flag always wins), and those that depend on other flags or on what is installed are
filled in afterwards by :mod:`megatron_switch.training.defaults`. Nothing here reads or writes
Megatron's global variables.
"""

import difflib
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import parse_args

from megatron_switch.config import FLAG_PREFIX, SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.recipes import RECIPES
from megatron_switch.training.flag_classes import fixed_defaults

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
    """Attributes of ``args`` whose flag stood on the command line."""


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse Megatron's and our flags, with Switch's defaults.

    Args:
        argv: Flags, without the program's name.

    Raises:
        ConfigError: An unknown flag, a malformed value, or a bad ``--switch-model`` file.
    """
    seen: set[str] = set()

    def add_switch_flags(parser: ArgumentParser) -> ArgumentParser:
        _SwitchFlags(SwitchConfig).build_group(parser, title="Switch Transformer")
        parser.error = _refuse  # type: ignore[method-assign]  # Megatron's 800-line usage helps nobody
        flags = {flag: action.dest for action in parser._actions for flag in action.option_strings}
        _refuse_unknown(argv, flags)
        seen.update(flags[word] for word in _flag_words(argv) if word in flags)
        parser.set_defaults(**_defaults(argv, known=set(flags.values())))
        return parser

    with _command_line_of(argv):
        args = parse_args(add_switch_flags)
    return CommandLine(args, frozenset(seen))


def add_switch_arguments(parser: ArgumentParser) -> None:
    """Add the ``--switch-*`` flags to a parser, for help texts and documentation."""
    _SwitchFlags(SwitchConfig).build_group(parser, title="Switch Transformer")


class _SwitchFlags(ArgumentGroupFactory):  # type: ignore[misc]
    """Megatron's flag factory with our prefix."""

    def _format_arg_name(self, config_attr_name: str, prefix: str | None = None) -> str:
        name: str = super()._format_arg_name(FLAG_PREFIX + config_attr_name, prefix)
        return name

    def _build_argparse_kwargs_from_field(self, attribute: Any) -> dict[str, Any]:
        kwargs: dict[str, Any] = super()._build_argparse_kwargs_from_field(attribute)
        kwargs["dest"] = FLAG_PREFIX + attribute.name
        kwargs["help"] = " ".join(kwargs["help"].split()).replace("%", "%%")
        return kwargs


def _defaults(argv: Sequence[str], known: set[str]) -> dict[str, object]:
    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--switch-recipe", default="switch")
    early.add_argument("--switch-model")
    chosen, _ = early.parse_known_args(list(argv))
    # An unknown recipe is reported by the real parser, which lists the choices.
    recipe = RECIPES.get(chosen.switch_recipe, RECIPES["switch"])
    model = {} if chosen.switch_model is None else _read_model(Path(chosen.switch_model), known)
    return {**SWITCH_DEFAULTS, **recipe, **model}


def _read_model(path: Path, known: set[str]) -> dict[str, object]:
    """Return the flags of a ``--switch-model`` file as attributes."""
    try:
        flags = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"--switch-model names a JSON file of Megatron flags; {path} does not exist."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--switch-model names a JSON file of Megatron flags; {path} cannot be read: {error}."
        ) from error
    if not isinstance(flags, dict):
        raise ConfigError(
            f"--switch-model wants a JSON object of flags and values; {path} holds a "
            f"{type(flags).__name__}."
        )
    attributes = {name.lstrip("-").replace("-", "_"): value for name, value in flags.items()}
    unknown = sorted(set(attributes) - known)
    if unknown:
        raise ConfigError(
            f"--switch-model {path} holds names that are no Megatron flag: {', '.join(unknown)}."
            f"{_suggestion(unknown[0], known)}"
        )
    return attributes


def _flag_words(argv: Sequence[str]) -> list[str]:
    return [word.split("=", 1)[0] for word in argv if word.startswith("--")]


def _refuse_unknown(argv: Sequence[str], flags: Mapping[str, str]) -> None:
    for word in _flag_words(argv):
        if word not in flags:
            raise ConfigError(f"There is no flag {word}.{_suggestion(word, flags)}")


def _suggestion(word: str, known: Mapping[str, str] | set[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.7)
    return f" Did you mean {' or '.join(close)}?" if close else " See docs/flags.md for the list."


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"The command line cannot be used: {message}.")


@contextmanager
def _command_line_of(argv: Sequence[str]) -> Iterator[None]:
    """Let Megatron's parser, which reads ``sys.argv``, see ``argv``."""
    saved = sys.argv
    sys.argv = [saved[0], *argv]
    try:
        yield
    finally:
        sys.argv = saved


def switch_attributes() -> tuple[str, ...]:
    """Return the names of all ``switch_*`` attributes, in the order of their declaration."""
    return tuple(FLAG_PREFIX + field.name for field in fields(SwitchConfig))
