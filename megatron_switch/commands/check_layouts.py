"""``megatron-switch check-layouts``: train in every legal layout and compare with one rank."""

from argparse import ArgumentParser, Namespace

from megatron_switch.commands.layout_check.cases import QUICK_RANKS, WORLD_SIZES


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's flags."""
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


def run(args: Namespace) -> int:
    """Check layouts, print what came of each, and return 0 if all are equal, else 1.

    Raises:
        ConfigError: There is no layout to check.
    """
    from megatron_switch.commands.layout_check.comparison import check_layouts

    return check_layouts(args)
