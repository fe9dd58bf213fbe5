"""``megatron-switch reshard``: rewrite a checkpoint for another layout, offline, in one process."""

from argparse import ArgumentParser, Namespace

from megatron_switch.flags.argv import attribute_of
from megatron_switch.layout.sizes import FLAGS
from megatron_switch.utils.argument_types import count, path

_SIZES = ("tp", "pp", "ep", "etp")  # data parallelism is what is left of the ranks


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's flags."""
    parser.description = (
        "Rewrite a checkpoint for another layout, weights and optimizer moments together, in one "
        "process and without a model."
    )
    parser.add_argument("--load", type=path, required=True, metavar="DIR")
    parser.add_argument("--save", type=path, required=True, metavar="DIR")
    parser.add_argument("--iteration", type=int, help="default: the newest one")
    for name in _SIZES:
        parser.add_argument(
            FLAGS[name], type=count, default=1, metavar="N", help=f"new {name.upper()}"
        )
    parser.add_argument(
        "--decoder-first-pipeline-num-layers",
        type=int,
        metavar="N",
        help="layers of the first pipeline stage (default: as many as any other)",
    )
    parser.add_argument(
        "--decoder-last-pipeline-num-layers", type=int, metavar="N", help="of the last one"
    )
    parser.add_argument(
        "--pipeline-model-parallel-layout",
        metavar="Ett|ttL",
        help="layers of every stage, in Megatron's letters",
    )
    parser.add_argument(
        "--world-size",
        type=count,
        metavar="N",
        help="ranks of the next run (default: the fewest that the sizes need)",
    )
    parser.add_argument(
        "--workers", type=count, default=1, metavar="N", help="threads; memory grows with them"
    )


def run(args: Namespace) -> int:
    """Rewrite the checkpoint, and return the exit code.

    Raises:
        SwitchError: The layout is not legal for the model, or the checkpoint cannot be moved.
    """
    from megatron_switch.commands.checkpoints.reshard import reshard

    reshard(args, {name: getattr(args, attribute_of(FLAGS[name])) for name in _SIZES})
    return 0
