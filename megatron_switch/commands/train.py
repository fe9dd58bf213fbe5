"""``megatron-switch train``: the training session of this rank.

All flags are Megatron's and the ``--switch-*`` flags, which the trainer's own parser reads.
"""

from argparse import SUPPRESS, Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any, NoReturn

from megatron_switch.flags.train_flags import SWITCH_GROUP, add_group, refuse_unknown
from megatron_switch.utils.help_text import ShowingDefaults

EXAMPLE = """\
megatron-switch train --num-experts 8 \\
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 \\
    --seq-length 128 --max-position-embeddings 128 \\
    --micro-batch-size 8 --train-iters 100 --lr 1e-3 \\
    --data-path corpus/corpus \\
    --tokenizer-type SentencePieceTokenizer --tokenizer-model corpus/tokenizer.model"""
"""A command in which every flag but ``--num-experts`` is needed."""

_DESCRIPTION = """\
Takes every flag of Megatron-LM's training, with Switch's defaults, and those below. docs/flags.md
lists how each mixture-of-experts flag of Megatron is treated."""

_EPILOG = f"""\
Needed: those of this example, which trains on what 'megatron-switch prepare TEXT --output corpus'
made. --num-experts makes it a Switch Transformer; without it the model is dense.

  {EXAMPLE}

To keep and continue a run, add --switch-run-dir DIR. On CPU ranks: megatron-switch launch-local."""


class ShowAllFlags(Action):
    """Shows every flag of a training, and ends the program."""

    def __init__(self, **options: Any) -> None:
        """Take no value."""
        super().__init__(**{"nargs": 0, "default": SUPPRESS, **options})

    def __call__(self, parser: ArgumentParser, *_: Any) -> NoReturn:
        """Print and exit."""
        print(_help(all_flags=True))
        parser.exit()


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags that ask for help; all others are left for the trainer."""
    parser.format_help = _help  # type: ignore[method-assign]  # not of this parser's flags
    parser.add_argument("--help-all", action=ShowAllFlags)


def run(args: Namespace) -> int:
    """Train, and return the exit code.

    Raises:
        SwitchError: The run cannot start, or cannot go on.
    """
    refuse_unknown(args.train_flags)  # before Megatron is imported, which takes seconds
    from megatron_switch.training.loop.session import train

    train(args.train_flags)
    return 0


class _Formatter(RawDescriptionHelpFormatter, ShowingDefaults):
    """Keeps the lines of the example."""


def _help(*, all_flags: bool = False) -> str:
    """Return the help text, with Megatron's flags or without."""
    parser = ArgumentParser(
        prog="megatron-switch train",
        usage="megatron-switch train [MEGATRON FLAGS] [SWITCH FLAGS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_Formatter,
    )
    parser.add_argument(
        "--help-all", action="store_true", help="show this message with Megatron's flags and exit"
    )
    if all_flags:
        from megatron_switch.training.arguments.parser import add_all_arguments

        add_all_arguments(parser)
    else:
        add_group(parser, SWITCH_GROUP)
    return parser.format_help()
