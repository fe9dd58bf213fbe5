"""The help text of ``megatron-switch train``: our flags or all of them, and how to begin."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

from megatron.training.arguments import add_megatron_arguments

from megatron_switch.flags.recipes import RECIPES
from megatron_switch.training.arguments.parser import SWITCH_DEFAULTS, add_switch_arguments
from megatron_switch.utils.help_text import ShowingDefaults

_DESCRIPTION = """\
Takes every flag of Megatron-LM's training, with Switch's defaults, and those below. docs/flags.md
lists how each mixture-of-experts flag of Megatron is treated."""

EXAMPLE = """\
megatron-switch train --num-experts 8 \\
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 \\
    --seq-length 128 --max-position-embeddings 128 \\
    --micro-batch-size 8 --train-iters 100 --lr 1e-3 \\
    --data-path corpus/corpus \\
    --tokenizer-type SentencePieceTokenizer --tokenizer-model corpus/tokenizer.model"""
"""A command in which every flag but ``--num-experts`` is needed."""

_EPILOG = f"""\
Needed: those of this example, which trains on what 'megatron-switch prepare TEXT --output corpus'
made. --num-experts makes it a Switch Transformer; without it the model is dense.

  {EXAMPLE}

To keep and continue a run, add --switch-run-dir DIR. On CPU ranks: megatron-switch launch-local."""


class _Formatter(RawDescriptionHelpFormatter, ShowingDefaults):
    """Keeps the lines of the example."""


def train_help(*, all_flags: bool = False) -> str:
    """Return the help text.

    Args:
        all_flags: Whether to list Megatron's flags too, with the defaults that they have here.
    """
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
        add_megatron_arguments(parser)
    add_switch_arguments(parser)
    parser.set_defaults(**{**SWITCH_DEFAULTS, **RECIPES["switch"]})
    return parser.format_help()
