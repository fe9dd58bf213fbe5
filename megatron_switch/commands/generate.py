"""``megatron-switch generate``: continue a prompt with a trained checkpoint."""

from argparse import ArgumentParser, Namespace

from megatron_switch.commands.trained_model_flags import OTHER_FLAGS, add_load, check_load
from megatron_switch.errors import ConfigError


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's own flags; all others are those of a training."""
    parser.usage = "megatron-switch generate --load FOLDER --prompt TEXT [OPTIONS] [MEGATRON FLAGS]"
    parser.description = (
        "Continues a prompt with a trained checkpoint; an encoder-decoder (t5) answers it. Model "
        "and tokenizer are those that the checkpoint names; the text goes to standard output, "
        "everything else to standard error."
    )
    parser.epilog = OTHER_FLAGS
    add_load(parser)
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; - reads standard input; may be repeated",
    )
    add(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="the same from a UTF-8 file, without the line end at its end; may be repeated",
    )
    add(
        "--num-tokens",
        "--max-new-tokens",
        type=int,
        default=100,
        metavar="N",
        help="tokens to add at most",
    )
    add(
        "--temperature",
        type=float,
        metavar="X",
        help="divides the scores: below 1 bolder, 0 is --greedy (0.8)",
    )
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="choose among the likeliest tokens that reach this probability together (0.9)",
    )
    add("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens; 0 for all (0)")
    add("--greedy", action="store_true", help="always take the likeliest token")
    add("--seed", type=int, default=1, metavar="N", help="seed of the draws")
    add(
        "--drop",
        action="store_true",
        help="limit experts to their capacity in evaluation; without it no token is dropped",
    )


def run(args: Namespace) -> int:
    """Print the continuation of each prompt, and return the exit code.

    Raises:
        SwitchError: Prompt, checkpoint, tokenizer or flags cannot be used.
    """
    if args.num_tokens < 1:
        raise ConfigError(f"At least one token must be added, got --num-tokens {args.num_tokens}.")
    check_load(args)
    from megatron_switch.commands.inspect.generate import generate

    generate(args)
    return 0
