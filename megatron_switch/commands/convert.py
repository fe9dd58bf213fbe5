"""``megatron-switch convert``: between Hugging Face's format and Megatron's.

convert hf-to-megatron --hf DIR --megatron DIR
convert megatron-to-hf --megatron DIR --hf DIR
convert inspect DIR
convert verify --hf DIR --megatron DIR
"""

from argparse import ArgumentParser, Namespace

from megatron_switch.utils.argument_types import count, path

DTYPE_NAMES = ("keep", "bf16", "fp32")
MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "switch_gpt",
    "switch_transformers",
    "t5",
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the actions and their flags; ``action`` is the first word."""
    parser.description = (
        "Convert checkpoints between Hugging Face's format and Megatron's, one tensor at a time, "
        "without building a model."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")

    action = actions.add_parser("hf-to-megatron", help="write a Megatron checkpoint")
    _folders(action)
    _common(action)
    action.add_argument(
        "--vocab-multiple",
        type=count,
        metavar="N",
        default=8,
        help="pad the vocabulary with rows of zeros to a multiple of this (default: %(default)s, "
        "which every tensor-parallel size up to 8 divides)",
    )
    action.add_argument(
        "--workers",
        type=count,
        default=1,
        metavar="N",
        help="threads; memory grows with them (default: 1)",
    )

    action = actions.add_parser("megatron-to-hf", help="write a folder in Hugging Face's format")
    _folders(action)
    _common(action)
    action.add_argument("--iteration", type=int, help="default: the newest one")
    action.add_argument(
        "--architecture",
        choices=("auto", *MODEL_TYPES),
        default="auto",
        help="model type to write; auto takes a stock one that computes the same where there is "
        "one (default)",
    )
    action.add_argument(
        "--vocab-size",
        type=count,
        metavar="N",
        help="rows of the embedding (default: without the padding that a run added)",
    )
    action.add_argument(
        "--tokenizer-model", type=path, help="where the tokenizer is now, if it was moved"
    )
    action.add_argument("--no-tokenizer", action="store_true", help="write no tokenizer")

    action = actions.add_parser("inspect", help="say what a folder holds")
    action.add_argument("folder", type=path, metavar="DIR")

    action = actions.add_parser("verify", help="compare the two sides")
    _folders(action)
    action.add_argument("--iteration", type=int, help="default: the newest one")
    action.add_argument(
        "--tensors-only",
        action="store_true",
        help="compare tensors only, one at a time, without building either model",
    )


def _folders(parser: ArgumentParser) -> None:
    parser.add_argument("--hf", type=path, required=True, metavar="DIR")
    parser.add_argument("--megatron", type=path, required=True, metavar="DIR")


def _common(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=DTYPE_NAMES, default="keep", help="type of the weights (default: keep)"
    )


def run(args: Namespace) -> int:
    """Convert, inspect or verify, and return the exit code.

    Raises:
        SwitchError: Something cannot be converted; nothing was written.
    """
    from megatron_switch.commands.checkpoints.convert import convert

    convert(args)
    return 0
