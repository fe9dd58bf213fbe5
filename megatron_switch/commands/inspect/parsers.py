"""The flags of commands that look at a trained model, apart from what the commands need.

Torch and Megatron take seconds to import, and a help text or a mistyped flag must not wait for
them: nothing here imports either, so the command line parses with this before it imports the rest.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

SWEPT_FACTORS = "1,1.25,1.5,2,-1"
"""What capacity-sweep evaluates at, unless told."""
_OTHER_FLAGS = (
    "All other flags are those of 'megatron-switch train', for layout (under torchrun), device "
    "(--switch-device), --ckpt-step, --tokenizer-model and what else shall differ from the "
    "checkpoint."
)


def generate_parser() -> ArgumentParser:
    """Return the parser of ``megatron-switch generate``; what it does not know is Megatron's."""
    parser = ArgumentParser(
        prog="megatron-switch generate",
        usage="megatron-switch generate --load FOLDER --prompt TEXT [OPTIONS] [MEGATRON FLAGS]",
        description="Continues a prompt with a trained checkpoint; an encoder-decoder (t5) answers "
        "it. Model and tokenizer are those "
        "that the checkpoint names; the text goes to standard output, everything else to standard "
        "error.",
        epilog=_OTHER_FLAGS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--load",
        type=Path,
        metavar="FOLDER",
        help="checkpoint folder, or the --switch-run-dir of a training",
    )
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
        help="tokens to add at most (100)",
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
    add("--seed", type=int, default=1, metavar="N", help="seed of the draws (1)")
    add(
        "--drop",
        action="store_true",
        help="limit experts to their capacity in evaluation; without it no token is dropped",
    )
    return parser


def experts_parser() -> ArgumentParser:
    """Return the parser of ``megatron-switch experts``; what it does not know is Megatron's."""
    parser = ArgumentParser(
        prog="megatron-switch experts",
        usage="megatron-switch experts --load FOLDER [OPTIONS] [MEGATRON FLAGS]",
        description="Shows which tokens each expert of the last sparse layer gets more often than "
        "the average, over text of the training data.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--load", type=Path, metavar="FOLDER", help="checkpoint folder, or a --switch-run-dir")
    add("--sequences", type=int, default=200, metavar="N", help="sequences to read (200)")
    add("--num-tokens", type=int, default=6, metavar="N", help="tokens to show for an expert (6)")
    add("--min-count", type=int, default=20, metavar="N", help="least occurrences (20)")
    return parser


def parse_capacity_sweep(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the flags of ``megatron-switch capacity-sweep``, and the words left for Megatron.

    The checkpoint is ``checkpoint``, however it was given. A parser that knew both ways at once
    would take the value of one of Megatron's flags for the word without a flag.

    Args:
        argv: Words without the command's name.

    Raises:
        SystemExit: After help, or with code 2 and a message: both ways were used, or none.
    """
    by_flag = any(word == "--load" or word.startswith("--load=") for word in argv)
    parser = _capacity_sweep_parser(has_word=not by_flag)
    own, left = parser.parse_known_args(list(argv))
    if by_flag:
        if left and not left[0].startswith("-"):
            parser.error(
                f"the checkpoint is given twice, as {left[0]} and with --load {own.load}: leave "
                "one out"
            )
        own.checkpoint = own.load
    return own, left


def _capacity_sweep_parser(*, has_word: bool) -> ArgumentParser:
    parser = ArgumentParser(
        prog="megatron-switch capacity-sweep",
        usage="megatron-switch capacity-sweep (CHECKPOINT | --load FOLDER) [OPTIONS] "
        "[MEGATRON FLAGS]",
        description="Evaluates a trained checkpoint at several capacity factors, without training: "
        "what is dropped, and what it costs.",
        epilog=_OTHER_FLAGS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    if has_word:
        add(
            "checkpoint",
            type=Path,
            metavar="CHECKPOINT (or --load FOLDER)",
            help="checkpoint folder, or the --switch-run-dir of a training; comes first",
        )
    add("--load", type=Path, metavar="FOLDER", help="the same, as other commands take it")
    add(
        "--factors",
        default=SWEPT_FACTORS,
        metavar="LIST",
        help=f"capacity factors; a negative one drops nothing ({SWEPT_FACTORS}). Write "
        "--factors=-1,2 where the first is negative.",
    )
    add(
        "--samples",
        type=int,
        default=256,
        metavar="N",
        help="validation sequences to evaluate on (256)",
    )
    add(
        "--micro-batch-size",
        type=int,
        metavar="B",
        help="sequences that share a capacity (that of evaluation in training)",
    )
    add(
        "--data-path",
        nargs="+",
        metavar="PREFIX",
        help="prepared data to evaluate on (that of the training)",
    )
    add("--split", metavar="A,B,C", help="which part of it is for validation (as in training)")
    add("--json", action="store_true", help="print one JSON object instead of a table")
    return parser
