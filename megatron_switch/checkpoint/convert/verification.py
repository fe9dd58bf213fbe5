"""Compare the two sides of a conversion tensor by tensor, without a model.

Every entry of the name map is packed from Hugging Face's side and compared with Megatron's tensor,
bit by bit, signs of zeros included. Where the types differ (``--dtype``), the side of the finer one
is either the other's values in more bits, or was rounded to them; these differ, so that a
bit that only the finer side has shows as one tensor more that was rounded.

What is to be compared is planned first, from names, shapes and sizes alone, so that progress can be
shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_switch.checkpoint.convert.architectures import describe_import
from megatron_switch.checkpoint.convert.conversion import open_weights, stored_args
from megatron_switch.checkpoint.convert.name_map import MapEntry
from megatron_switch.checkpoint.formats.hf_folder import CONFIG, HuggingFaceSource, read_json
from megatron_switch.checkpoint.formats.tensor_source import TensorSource, differing_bits
from megatron_switch.checkpoint.load.files import FoundCheckpoint
from megatron_switch.errors import CheckpointError


@dataclass(frozen=True)
class TensorComparison:
    """What was compared, when nothing differs."""

    tensors: int
    """Tensors of Megatron, each expert counted on its own."""
    nbytes: int
    widened: int
    """Tensors whose types differ, with the same values in both."""
    rounded: int
    """Tensors whose types differ, and of which the finer side had to be rounded to be equal."""


@dataclass(frozen=True)
class Comparison:
    """What is to be compared."""

    hf: Path
    folder: Path
    """Folder of Megatron's iteration."""
    entries: tuple[MapEntry, ...]
    source: TensorSource
    """Hugging Face's side."""
    weights: TensorSource
    """Megatron's side."""

    @property
    def nbytes(self) -> int:
        """Size of Megatron's tensors, each entry and copy of it."""
        tensors = self.weights.tensors
        return sum(each.region.numel * tensors[key].dtype.itemsize for each, key in self._pairs())

    def carry_out(
        self, *, on_bytes: Callable[[int], None] = lambda count: None
    ) -> TensorComparison:
        """Raise unless every tensor is the same on both sides.

        Args:
            on_bytes: Called with the size of each tensor that was compared; they add up to
                :attr:`nbytes`.

        Raises:
            CheckpointError: Naming file, key and how many elements differ.
        """
        nbytes = widened = rounded = 0
        for entry, key in self._pairs():
            theirs, ours = entry.pack(self.source), self.weights.read(key, entry.region)
            # Rounding the finer side is the only change a conversion with --dtype makes.
            coarse = max(theirs.dtype, ours.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            differing = differing_bits(theirs.to(coarse), ours.to(coarse))
            if differing:
                raise CheckpointError(
                    f"{self.folder}: {key} at {entry.region.offsets} differs from "
                    f"{', '.join(entry.names())} in {self.hf}: {differing} of {ours.numel()} "
                    "elements."
                )
            if theirs.dtype != ours.dtype:
                both = torch.promote_types(theirs.dtype, ours.dtype)
                # Equal in the finer type too: no bit was lost, so nothing had been rounded.
                is_exact = torch.equal(theirs.to(both), ours.to(both))
                widened, rounded = widened + is_exact, rounded + (not is_exact)
            nbytes += ours.nbytes
            on_bytes(ours.nbytes)
        return TensorComparison(len(self.entries), nbytes, widened, rounded)

    def _pairs(self) -> Iterator[tuple[MapEntry, str]]:
        return ((entry, key) for entry in self.entries for key in (entry.key, *entry.copies))


def plan_comparison(hf: Path, found: FoundCheckpoint) -> Comparison:
    """Return what is to be compared of two folders.

    Args:
        hf: Folder in Hugging Face's format.
        found: Megatron's checkpoint.

    Raises:
        CheckpointError: Naming what either side lacks.
    """
    args = stored_args(found)
    source = HuggingFaceSource(hf)
    config = read_json(hf / CONFIG)
    # The padding is the checkpoint's: any multiple may have been chosen.
    multiple = int(args.padded_vocab_size)
    name_map = describe_import(config, str(hf / CONFIG), source.tensors, multiple=multiple).name_map
    name_map.check_other_side(source)
    weights, others, _ = open_weights(found, args)
    name_map.check_megatron(weights, others)
    return Comparison(hf, found.folder, name_map.entries, source, weights)
