"""``megatron-switch upcycle``: a dense model becomes a Switch model.

Its experts begin as the dense MLPs. The dense model is a Megatron checkpoint (``--load``) or a
folder in Hugging Face's format (``--hf``: Llama, Qwen2, Qwen3, T5). With ``--text`` the first loss
of the new model is reported beside the dense one's.
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace

from megatron_switch.errors import DataError
from megatron_switch.utils.argument_types import count, not_negative, path

_MOST_EXPERTS = 2**16  # of which each is a tensor to write; the largest Switch has 2048


def experts(text: str) -> int:
    """Return a number of experts."""
    if (number := count(text)) > _MOST_EXPERTS:
        raise ArgumentTypeError(f"takes a whole number from 1 to {_MOST_EXPERTS}, got '{text}'")
    return number


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = "Turn a dense model into a Switch model whose experts begin as its MLPs."
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--load", type=path, metavar="DIR", help="a Megatron checkpoint")
    source.add_argument("--hf", type=path, metavar="DIR", help="Hugging Face's Llama, Qwen or T5")
    parser.add_argument("--save", type=path, required=True, metavar="DIR")
    parser.add_argument("--num-experts", type=experts, required=True, metavar="E")
    parser.add_argument(
        "--moe-layer-freq",
        metavar="[0,1,...]",
        help="which layers get experts, of both stacks where there are two (default: every second)",
    )
    parser.add_argument(
        "--switch-decoder-layer-freq",
        metavar="[0,1,...]",
        help="which layers of an encoder-decoder's decoder do, where they are others",
    )
    parser.add_argument(
        "--scale",
        choices=("none", "sqrt_e"),
        default="none",
        help="none: plain copies. sqrt_e: two factors sqrt(E) undo the gate of a uniform router",
    )
    parser.add_argument(
        "--router-scale",
        type=not_negative,
        default=0.1,
        metavar="S",
        help="--switch-init-scale of the new routers; 0 makes them zero (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the routers")
    parser.add_argument(
        "--text", type=path, metavar="FILE", help="report the first loss on this text"
    )
    parser.add_argument("--workers", type=count, default=1, metavar="N", help="threads")


def run(args: Namespace) -> int:
    """Upcycle the model, and return the exit code.

    Raises:
        SwitchError: The model cannot be upcycled, and nothing was written; or it was, and its first
            loss is not known.
    """
    if args.text is not None and not args.text.is_file():
        raise DataError(f"--text {args.text} is no file. Name a text, or leave the flag out.")
    from megatron_switch.commands.checkpoints.upcycle import upcycle_model

    upcycle_model(args)
    return 0
