"""The argument namespace of a checkpoint that no run wrote.

A converted checkpoint stores what a run of its model would have stored, so that
``--use-checkpoint-args``, ``generate`` and every check at the start of a run work with it. Megatron
stores its whole namespace, of a thousand attributes with defaults that depend on one another, and
has no function that makes one but its parser and its validation. So a conversion, which needs no
model, runs both, as a run does.
"""

from argparse import Namespace
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from megatron_switch.config import SwitchConfig
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.flags.argv import argv_of
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.arguments.parser import parse_command_line
from megatron_switch.training.loop.global_state import validate
from megatron_switch.training.loop.gpt_builder import resolve_dispatch
from megatron_switch.training.preflight.layout import check_layout


def written_arguments(flags: Mapping[str, Any], *, padded_vocab_size: int) -> Namespace:
    """Return what a run on one rank with some flags would store in its checkpoint.

    Args:
        flags: Flags of the model and its tokenizer, without dashes.
        padded_vocab_size: Rows of the embedding.

    Raises:
        ConfigError: Megatron refuses the flags.
    """
    line = parse_command_line([*argv_of(flags), "--switch-device", "cpu"])
    args = line.args
    # Megatron prints all of its thousand arguments; what is wrong with them arrives as an error.
    with cuda_on_cpu(), redirect_stdout(StringIO()):
        fill_defaults(line, "cpu")
        args.micro_batch_size = 1
        check_layout(args, resolve_dispatch(args, SwitchConfig.from_args(args), "cpu"))
        validate(args)
    args.padded_vocab_size = padded_vocab_size
    return args
