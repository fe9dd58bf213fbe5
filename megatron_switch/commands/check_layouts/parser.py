"""The flags of ``megatron-switch check-layouts``, apart from what it needs.

Help texts and mistyped flags are answered without torch, which takes seconds to import.
"""

from argparse import ArgumentParser

from megatron_switch.commands.check_layouts.cases import WORLD_SIZES

QUICK_RANKS = 4
"""Ranks of the largest layouts of ``--quick``."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cpu: forked ranks of this host. cuda: the ranks of torchrun, with NCCL and, where it "
        "is installed, Transformer Engine; layouts of that many ranks only.",
    )
    parser.add_argument(
        "--max-ranks",
        type=int,
        default=max(WORLD_SIZES),
        metavar="N",
        help=f"on the CPU, layouts of up to N of {', '.join(map(str, WORLD_SIZES))} ranks",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"few layouts, of up to {QUICK_RANKS} ranks: any two sizes or settings that meet in "
        "a layout of so many ranks still meet in one",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object for each layout, in place of the table"
    )
