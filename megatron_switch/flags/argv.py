"""Flags as words of a command line (argv), and back.

A flag has three spellings, and each stands for the others: ``--num-layers`` on a command line,
``num-layers`` in a model file, ``num_layers`` as an attribute of a parsed namespace. A value that
is True means the flag alone; one that is False or None means that the flag is not given.
"""

from collections.abc import Mapping, Sequence

from megatron_switch.errors import ConfigError


def flag_name(name: str) -> str:
    """Return a flag as it is typed, ``--num-layers``, whichever way it is spelled."""
    return "--" + name.lstrip("-").replace("_", "-")


def flag_key(name: str) -> str:
    """Return a flag as model files and :func:`flags_of_argv` name it, ``num-layers``."""
    return flag_name(name).removeprefix("--")


def attribute_of(flag: str) -> str:
    """Return the attribute of a parsed namespace that holds a flag's value, ``num_layers``.

    A few flags of Megatron store elsewhere, such as ``--disable-bias-linear``.
    """
    return flag.removeprefix("--").replace("-", "_")


def argv_of(flags: Mapping[str, object]) -> list[str]:
    """Return flags as the words of a command line.

    Args:
        flags: Values by flag, in any spelling. The entries of a list become several words.
    """
    argv: list[str] = []
    for name, value in flags.items():
        if value is False or value is None:
            continue
        argv.append(flag_name(name))
        if isinstance(value, list):
            argv += map(str, value)
        elif value is not True:
            argv.append(str(value))
    return argv


def flags_of_argv(argv: Sequence[str]) -> dict[str, object]:
    """Return the flags of a command line: texts by name without dashes; the last one wins.

    A flag without a value is True, several values of one flag are a list.

    Raises:
        ConfigError: If the words do not begin with a flag.
    """
    flags: dict[str, object] = {}
    name = None
    for word in argv:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            flags[name] = value if "=" in word else True
        elif name is None:
            raise ConfigError(f"Pretrain flags begin with two dashes, but '{word}' comes first.")
        else:
            before = flags[name]
            more = [*before, word] if isinstance(before, list) else [str(before), word]
            flags[name] = word if before is True else more
    return flags


def split_train_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command's own words and, from after the first ``--``, a training's flags."""
    words = list(argv)
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]
