"""``megatron-switch evaluate``: loss, perplexity and drops of a trained model."""

from argparse import ArgumentParser, Namespace

from megatron_switch.commands.trained_model_flags import (
    OTHER_FLAGS,
    add_evaluation_data,
    add_load,
    take_checkpoint,
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's own flags; all others are those of a training.

    The checkpoint may stand first, as for ``capacity-sweep``.
    """
    parser.usage = (
        "megatron-switch evaluate (CHECKPOINT | --load FOLDER) [OPTIONS] [MEGATRON FLAGS]"
    )
    parser.description = (
        "Evaluates a trained model and prints loss, perplexity and the drop rate of each layer. "
        "Model, tokenizer and data are those that the checkpoint names; CHECKPOINT is the folder "
        "that --load takes. Nothing is trained and nothing written."
    )
    parser.epilog = OTHER_FLAGS
    add_load(parser)
    add_evaluation_data(parser)
    parser.add_argument("--test", action="store_true", help="read the test data, not validation")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: Namespace) -> int:
    """Print the evaluation, and return the exit code.

    Raises:
        SwitchError: The checkpoint, its data or the flags cannot be used.
    """
    take_checkpoint(args)
    from megatron_switch.commands.inspect.evaluation import evaluate_checkpoint

    evaluate_checkpoint(args)
    return 0
