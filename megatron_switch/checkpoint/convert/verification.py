"""Compare the two sides of a conversion tensor by tensor, without a model.

Every entry of the name map is packed from Hugging Face's side and compared with Megatron's tensor,
bit by bit, signs of zeros included. Where the types differ (``--dtype``), the side of the finer one
is either the other's values in more bits, or was rounded to them; these differ, so that a
bit that only the finer side has shows as one tensor more that was rounded. Rows that pad Megatron's
vocabulary have no counterpart and are not compared.

What is to be compared is planned first, from names, shapes and sizes alone, so that progress can be
shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_switch.architecture.model import ROUTING, TRAINING_ONLY, Architecture, described
from megatron_switch.checkpoint.convert.architectures import describe_import, model_of_checkpoint
from megatron_switch.checkpoint.convert.gpt_types import SWITCH_GPT
from megatron_switch.checkpoint.convert.megatron_source import open_weights, stored_args
from megatron_switch.checkpoint.convert.name_map import MapEntry
from megatron_switch.checkpoint.convert.packing import PaddedRows
from megatron_switch.checkpoint.convert.t5_config import SWITCH
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
    coarsest: torch.dtype
    """Type with the fewest bits of all that were compared."""


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
    models: tuple[Architecture, Architecture]
    """What Hugging Face's configuration describes, and what Megatron's arguments do."""
    model_type: str

    @property
    def padding(self) -> int:
        """Rows of Megatron's vocabulary that have no counterpart."""
        ours = self.models[1]
        return ours.padded_vocab_size - self.models[0].vocab_size

    @property
    def without_class(self) -> bool:
        """Whether ``transformers`` has no class that computes the model."""
        gated = self.models[0].gated_linear_unit
        return self.model_type == SWITCH_GPT or (self.model_type == SWITCH and gated)

    def differing_settings(self) -> dict[str, tuple[Any, Any]]:
        """Return settings that decide what is computed, and differ: both values by field."""
        theirs, ours = self.models
        names = [each.name for each in described(theirs.family) if each.name not in TRAINING_ONLY]
        names += ["decoder", "encoder", "rope_scaling_factor"]
        if not ours.learned_positions and "max_position_embeddings" in names:
            names.remove("max_position_embeddings")  # no tensor depends on it
        pairs = {name: (getattr(theirs, name), getattr(ours, name)) for name in names}
        if self.model_type == SWITCH_GPT:
            routings = [
                {k: v for k, v in each.routing.items() if v is not None} for each in self.models
            ]
            pairs |= {name: (routings[0].get(name), routings[1].get(name)) for name in ROUTING}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

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
        coarsest = torch.float64
        for entry, key in self._pairs():
            theirs, ours = entry.pack(self.source), self.weights.read(key, entry.region)
            nbytes += ours.nbytes
            on_bytes(ours.nbytes)
            if isinstance(entry.packing, PaddedRows):  # training changes the others, and no export
                theirs, ours = theirs[: entry.packing.rows], ours[: entry.packing.rows]
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
            coarsest = max(coarsest, coarse, key=lambda dtype: torch.finfo(dtype).eps)
        return TensorComparison(len(self.entries), nbytes, widened, rounded, coarsest)

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
    model = describe_import(config, str(hf / CONFIG), source.tensors, multiple=multiple)
    name_map = model.name_map
    name_map.check_other_side(source)
    weights, others, _ = open_weights(found, args)
    name_map.check_megatron(weights, others)
    models = (model.architecture, model_of_checkpoint(args))
    return Comparison(hf, found.folder, name_map.entries, source, weights, models, model.model_type)
