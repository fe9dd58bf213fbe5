"""A Megatron checkpoint as a conversion reads it: its arguments, and its weights by layer.

Both are checked before anything is made of them.
"""

import math
from argparse import Namespace

from megatron_switch.checkpoint.formats.dist_metadata import NOT_WEIGHTS, read_common_state
from megatron_switch.checkpoint.formats.dist_reader import DistSource, LayeredSource
from megatron_switch.checkpoint.formats.tensor_source import TensorSource
from megatron_switch.checkpoint.load.files import FoundCheckpoint
from megatron_switch.checkpoint.load.norm_keys import NeutralNorms
from megatron_switch.checkpoint.load.stored_values import check_stored
from megatron_switch.errors import CheckpointError


def stored_args(found: FoundCheckpoint) -> Namespace:
    """Return the arguments that a checkpoint stores.

    Raises:
        CheckpointError: It stores none, or what no run can have.
    """
    args = read_common_state(found.folder).get("args")
    if not isinstance(args, Namespace):
        raise CheckpointError(
            f"{found.folder} stores no arguments, so its model is not known. Load it in a run "
            "with the model's flags, and convert what that run saves."
        )
    check_stored(args, found.folder)
    return args


def open_weights(
    found: FoundCheckpoint, args: Namespace
) -> tuple[TensorSource, frozenset[str], DistSource]:
    """Open a Megatron checkpoint with one key for each layer's weights.

    Args:
        found: The checkpoint.
        args: Arguments that it stores; the depth of its stacks is read.

    Returns:
        The weights by layer, the keys that are no weights, and the files below.

    Raises:
        CheckpointError: The arguments ask for more layers or experts than all tensors could hold.
    """
    files = DistSource(found.folder)
    others = frozenset(key for key in files.tensors if key.startswith(NOT_WEIGHTS))
    check_parts(files, args)
    depths = {"decoder": args.num_layers}
    if getattr(args, "switch_arch", "gpt") == "t5":
        depths = {"encoder": args.num_layers, "decoder": args.decoder_num_layers}
    return NeutralNorms(LayeredSource(files, depths, ignored=others)), others, files


def check_parts(files: DistSource, args: Namespace) -> None:
    """Refuse, before any list is made, numbers that a checkpoint has no room for.

    A layer and an expert have at least as many elements as the model is wide.

    Args:
        files: The checkpoint.
        args: Arguments that it stores.

    Raises:
        CheckpointError: The arguments ask for more layers or experts than all tensors could hold.
    """
    weights = (info for key, info in files.tensors.items() if not key.startswith(NOT_WEIGHTS))
    elements = sum(math.prod(info.shape) for info in weights)
    decoder = getattr(args, "decoder_num_layers", None) or 0
    layers, experts = args.num_layers + decoder, getattr(args, "num_experts", None) or 0
    if max(layers, experts) * args.hidden_size > elements:
        raise CheckpointError(
            f"{files.folder} stores --num-layers {layers} and --num-experts {experts}, which need "
            f"more than the {elements:,} numbers that its tensors have. The checkpoint is damaged, "
            "or another program changed it. Copy it again."
        )
