"""Compare the two sides of a conversion tensor by tensor, without a model.

Every row of the name table is packed from Hugging Face's side and compared with Megatron's tensor,
bit by bit, signs of zeros included. Where the types differ (``--dtype``), the side of the finer one
is either the other's values in more bits, or was rounded to them; the two are told apart, so that a
bit that only the finer side has shows as one tensor more that was rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_switch.checkpoint.architectures import describe_import
from megatron_switch.checkpoint.conversion import open_weights, stored_args
from megatron_switch.checkpoint.files import FoundCheckpoint
from megatron_switch.checkpoint.hf_folder import CONFIG, HuggingFaceSource, read_json
from megatron_switch.checkpoint.tensors import differing_bits
from megatron_switch.errors import CheckpointError


@dataclass(frozen=True)
class TensorComparison:
    """What was compared, when nothing differs."""

    rows: int
    """Tensors of Megatron, each expert counted on its own."""
    nbytes: int
    widened: int
    """Rows whose types differ, with the same values in both."""
    rounded: int
    """Rows whose types differ, and of which the finer side had to be rounded to be equal."""


def compare_sides(
    hf: Path, found: FoundCheckpoint, *, on_bytes: Callable[[int], None] = lambda count: None
) -> TensorComparison:
    """Raise unless every tensor is the same on both sides.

    Args:
        hf: Folder in Hugging Face's format.
        found: Megatron's checkpoint.
        on_bytes: Called with the size of each tensor that was compared.

    Raises:
        CheckpointError: Naming file, key and how many elements differ; or what either side lacks.
    """
    args = stored_args(found)
    source = HuggingFaceSource(hf)
    config = read_json(hf / CONFIG)
    # The padding is the checkpoint's: any multiple may have been chosen.
    multiple = int(args.padded_vocab_size)
    table = describe_import(config, str(hf / CONFIG), source.tensors, multiple=multiple).table
    table.check_other_side(source)
    weights, others, _ = open_weights(found, args)
    table.check_megatron(weights, others)
    nbytes = widened = rounded = 0
    for row in table.rows:
        for key in (row.key, *row.copies):
            theirs, ours = row.pack(source), weights.read(key, row.box)
            coarse = max(theirs.dtype, ours.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            differing = differing_bits(theirs.to(coarse), ours.to(coarse))
            if differing:
                raise CheckpointError(
                    f"{found.folder}: {key} at {row.box.offsets} differs from "
                    f"{', '.join(row.names())} in {hf}: {differing} of {ours.numel()} elements."
                )
            if theirs.dtype != ours.dtype:
                both = torch.promote_types(theirs.dtype, ours.dtype)
                is_exact = torch.equal(theirs.to(both), ours.to(both))
                widened, rounded = widened + is_exact, rounded + (not is_exact)
            nbytes += ours.nbytes
            on_bytes(ours.nbytes)
    return TensorComparison(len(table.rows), nbytes, widened, rounded)
