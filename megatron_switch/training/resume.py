"""Before a checkpoint is loaded: that it is there, whole, and of this model.

Megatron answers an empty tracker file with exit code 0, a missing one with random weights, and
another model with a shape error deep inside. All of that is decided here, from the files alone.
"""

from argparse import Namespace
from pathlib import Path

from megatron.training import get_tokenizer

from megatron_switch.checkpoint.agreement import check_resume
from megatron_switch.checkpoint.contents import read_common_state
from megatron_switch.checkpoint.files import find_checkpoint
from megatron_switch.models.vocabulary import padded_vocab_size


def find_what_to_load(args: Namespace) -> tuple[str, ...]:
    """Check what ``--load`` names, and make Megatron load exactly that.

    Args:
        args: Validated arguments; ``ckpt_step`` and ``padded_vocab_size`` may be set.

    Returns:
        What the user should know.

    Raises:
        CheckpointError: Nothing complete is there, or it does not fit this run.
    """
    if args.load is None:
        return ()
    found = find_checkpoint(Path(args.load), iteration=args.ckpt_step)
    state = read_common_state(found.folder)
    args.padded_vocab_size = padded_vocab_size(
        get_tokenizer().vocab_size,
        make_divisible_by=args.make_vocab_size_divisible_by,
        tensor_parallel_size=args.tensor_model_parallel_size,
        stored=getattr(state.get("args"), "padded_vocab_size", None),
    )
    notes = check_resume(state, args, is_release=found.is_release)
    if found.message is not None and not found.is_release:
        args.ckpt_step = found.iteration
    return (*([found.message] if found.message else []), *notes)
