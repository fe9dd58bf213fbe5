"""Compare the logits of the two sides of a conversion, on the same tokens.

Hugging Face's side is computed by ``transformers`` in float32 and evaluation mode, Megatron's by
:mod:`megatron_switch.training.inference.token_scores`. Tokens are drawn from the vocabulary with a
fixed seed: the weights decide the function, not the text. Experts have the capacity that the class
of ``transformers`` has, so that what is compared is the conversion; what the checkpoint's own
capacity changes is reported beside it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_switch.checkpoint.convert.t5_config import SWITCH
from megatron_switch.checkpoint.formats.hf_folder import CONFIG, read_json
from megatron_switch.checkpoint.load.files import FoundCheckpoint
from megatron_switch.errors import CheckpointError
from megatron_switch.training.inference.token_scores import (
    DROPLESS,
    Scored,
    round_weights,
    scored,
)

_BATCH, _SOURCE, _TARGET = 2, 48, 24
_TOLERANCE = 1e-5
"""Largest difference, relative to the largest logit where that is above one."""


@dataclass(frozen=True)
class OwnCapacity:
    """What the checkpoint's own capacity changes, where the other side has another."""

    other: str
    """What the other side does."""
    dropped: float
    """Share of tokens that are dropped, mean over the layers with experts."""
    difference: float
    """Largest change of a logit."""

    def __str__(self) -> str:
        """Return what to make of it."""
        return (
            f"{self.other}, and Megatron's side was computed likewise. With the checkpoint's own "
            f"capacity {self.dropped:.1%} of these random tokens are dropped, which changes logits "
            f"by up to {self.difference:.3g}."
        )


@dataclass(frozen=True)
class Parity:
    """How far two models' logits are apart."""

    tokens: int
    difference: float
    largest: float
    own_capacity: OwnCapacity | None = None
    """None where both sides have the same."""

    @property
    def tolerance(self) -> float:
        """Largest difference that rounding explains."""
        return _TOLERANCE * max(1.0, self.largest)


def compare_logits(
    hf: Path, found: FoundCheckpoint, *, rounded_to: torch.dtype = torch.float32
) -> Parity:
    """Return how far the two sides' logits are apart.

    Args:
        hf: Folder in Hugging Face's format.
        found: Megatron's checkpoint.
        rounded_to: Both sides' weights are rounded to this type: that of the coarser side.

    Raises:
        CheckpointError: ``transformers`` is missing, or opens the folder with weights drawn anew.
    """
    config = read_json(hf / CONFIG)
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> Tensor:
        size = int(config["vocab_size"])
        return torch.randint(0, size, (_BATCH, length), generator=generator)

    tokens_BS = draw(min(_SOURCE, int(config.get("max_position_embeddings", _SOURCE))))
    targets_BS = draw(_TARGET) if config.get("is_encoder_decoder") else None
    theirs_BSV = their_scores(hf, tokens_BS, targets_BS, rounded_to=rounded_to)

    def ours(routing: Mapping[str, Any]) -> Scored:
        return scored(found, tokens_BS, targets_BS, routing=routing, rounded_to=rounded_to)

    other, routing = _their_routing(config)
    likewise = ours(routing)
    ours_BSV = likewise.scores_BSV[..., : theirs_BSV.size(-1)]
    own_capacity = None
    if likewise.routed and routing:
        own = ours({})
        difference = float((own.scores_BSV - likewise.scores_BSV).abs().max())
        if difference:
            own_capacity = OwnCapacity(other, own.dropped / own.routed, difference)
    return Parity(
        tokens=theirs_BSV.shape[:2].numel(),
        difference=float((ours_BSV - theirs_BSV).abs().max()),
        largest=float(theirs_BSV.abs().max()),
        own_capacity=own_capacity,
    )


def _their_routing(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return what a class of ``transformers`` does with full experts, and settings for the same."""
    if config["model_type"] == SWITCH:
        slots = int(config["expert_capacity"])
        routing = {"capacity": slots, "capacity_group": "sequence", "drop_order": "first_come"}
        return f"Hugging Face's Switch has {slots} slots per expert and sequence", routing
    return f"{config['model_type']} of transformers has no capacity", DROPLESS


@torch.no_grad()
def their_scores(
    hf: Path,
    tokens_BS: Tensor,
    targets_BS: Tensor | None,
    *,
    rounded_to: torch.dtype = torch.float32,
) -> Tensor:
    """Return the scores of a model in Hugging Face's format, float32, shape (B, S, V).

    Args:
        hf: Its folder.
        tokens_BS: Tokens, int64; of an encoder-decoder, the encoder's.
        targets_BS: The decoder's tokens, for an encoder-decoder.
        rounded_to: Weights are rounded to this type.

    Raises:
        CheckpointError: ``transformers`` is missing, or opens the folder with weights drawn anew.
    """
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            "Comparing logits needs transformers. Install it with pip install "
            "'megatron-switch[hf]', or compare tensors only with --tensors-only."
        ) from error
    kind: Any = transformers.AutoModelForCausalLM
    if targets_BS is not None:
        kind = transformers.AutoModelForSeq2SeqLM
    try:
        with _without_bars(transformers.utils.logging):
            model, report = kind.from_pretrained(
                hf,
                dtype=torch.float32,
                attn_implementation="eager",  # the configuration may name what needs a GPU
                output_loading_info=True,
                local_files_only=True,
            )
    except Exception as error:  # each part of transformers checks the configuration in its way
        text = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"transformers cannot open {hf}: {text:.400}. Correct {hf / CONFIG}, or compare "
            "tensors only, with --tensors-only."
        ) from error
    anew = sorted(report["missing_keys"])
    if anew:
        raise CheckpointError(
            f"transformers would draw {', '.join(anew[:5])} anew when it opens {hf}: the folder "
            "is not complete for it, or it has no class for this model (a Switch with gated "
            "units). Compare tensors only, with --tensors-only."
        )
    round_weights(model, rounded_to)
    inputs = {"input_ids": tokens_BS}
    if targets_BS is not None:
        inputs["decoder_input_ids"] = targets_BS
    logits: Tensor = model.eval()(**inputs).logits
    return logits


@contextmanager
def _without_bars(library: Any) -> Iterator[None]:
    """Keep ``transformers`` from drawing progress bars over this program's own."""
    were_on = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            library.enable_progress_bar()
