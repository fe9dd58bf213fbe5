"""``megatron-switch prepare``: text in, Megatron's ``.bin`` and ``.idx`` out."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_switch.data.preparation.corpus import SKIP_FLAG
from megatron_switch.data.preparation.input_file import KNOWN_NAMES
from megatron_switch.data.preparation.prepare import prepare
from megatron_switch.data.preparation.prepared import summary
from megatron_switch.data.preparation.settings import DEFAULT_SAMPLE_MIB, SENTINELS_FLAG
from megatron_switch.data.tokenizer import add_tokenizer_arguments
from megatron_switch.utils.exit_codes import INTERRUPTED


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "inputs",
        nargs="*",
        type=Path,
        metavar="INPUT",
        help=f"File or folder with text: {KNOWN_NAMES}.",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="Folder for all that is made."
    )
    parser.add_argument(
        "--stdlib",
        action="store_true",
        help="Take the running Python's standard library: code and English on every machine.",
    )
    parser.add_argument(
        "--stdlib-tests",
        action="store_true",
        help="With --stdlib: its tests too, about three times as much text.",
    )
    parser.add_argument(
        "--text-key",
        metavar="KEY",
        help="Key of the text in .jsonl lines, and its column in .parquet. Default: text.",
    )
    parser.add_argument(
        "--document-separator",
        metavar="TEXT",
        help="Cut text files into documents wherever this stands; \\n is a line end. Default: "
        "one file is one document.",
    )
    parser.add_argument(
        SKIP_FLAG,
        action="store_true",
        help="Leave out files, lines and rows that hold no text, and say so, instead of stopping.",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="Processes. Default: one for each CPU core."
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace other results that --output holds."
    )
    add_tokenizer_arguments(parser)
    group = parser.add_argument_group("training a SentencePiece model, without --tokenizer-model")
    group.add_argument(
        "--sentencepiece-algorithm",
        choices=tuple(DEFAULT_SAMPLE_MIB),
        help="bpe trains faster, unigram tokenises faster. Default: bpe.",
    )
    group.add_argument(
        "--tokenizer-sample-mib",
        type=int,
        metavar="MIB",
        help="Most text to train on, taken evenly from all of it. Default: "
        + ", ".join(f"{size} for {name}" for name, size in DEFAULT_SAMPLE_MIB.items())
        + ".",
    )
    group.add_argument(
        SENTINELS_FLAG,
        type=int,
        metavar="N",
        help="Of the tokens of --vocab-size, the last N are <extra_id_0> to <extra_id_N-1> for "
        "the span corruption of --switch-arch t5; T5 has 100. Default: none.",
    )


def run(args: Namespace) -> int:
    """Prepare data, print what was made, and return the exit code.

    Raises:
        ConfigError: The flags cannot work together or in this installation.
        DataError: The input, the tokenizer or the disk cannot be used.
    """
    try:
        prepared = prepare(args)
    except KeyboardInterrupt:
        print(
            "Interrupted. Finished work is kept: run the same command to resume.", file=sys.stderr
        )
        return INTERRUPTED
    print(summary(prepared))
    return 0
