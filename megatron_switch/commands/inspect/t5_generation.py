"""What an encoder-decoder says to a prompt: the prompt is its input, the answer is what is decoded.

The prompt is encoded once. Every step then decodes one window of fixed width from the start token
on, as :mod:`megatron_switch.models.sampling` does it for a decoder alone. A t5 has no table of
positions, so an answer may grow beyond the length of training; a prompt is cut to it, as in
training.

Shape letters: B sequences (always 1), S positions of a window, V rows of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_switch.data.encoder_decoder import special_tokens
from megatron_switch.models.sampling import window_width
from megatron_switch.training.inference.trained_model import TrainedModel


@dataclass(frozen=True)
class Conditioned:
    """A decoder that has read a prompt.

    Attributes:
        logits: Scores of every position of a window, given its tokens and padding, (B, S) each.
        start: Token that every answer starts with.
        window: Positions of the window.
    """

    logits: Callable[[Tensor, Tensor], Tensor]
    start: int
    window: int


def conditioned_on(
    model: TrainedModel, prompt_ids: Sequence[int], *, num_tokens: int, full_window: bool
) -> Conditioned:
    """Encode a prompt. All ranks that share the model call this together.

    Args:
        model: A t5.
        prompt_ids: Tokens of the prompt; those beyond the sequence length of training are left out.
        num_tokens: Tokens of the answer at most.
        full_window: Whether both sides are as long as in training, or the answer longer.
    """
    special = special_tokens(model.tokenizer)
    multiple, context = model.width_multiple, model.context_length
    source = [*prompt_ids[: context - 1], special.end]
    width = window_width(len(source), context_length=context, multiple_of=multiple)
    source_BS = torch.full((1, context if full_window else width), special.padding)
    source_BS[0, : len(source)] = torch.tensor(source)
    padding_BS = (torch.arange(source_BS.size(1)) >= len(source)).unsqueeze(0).cuda()
    module: Any = model.module
    with torch.no_grad():
        (inner,) = unwrap_model([module])
        encoded = inner.encode(source_BS.cuda(), padding_BS)

    def logits(tokens_BS: Tensor, decoder_padding_BS: Tensor) -> Tensor:
        with torch.no_grad():
            logits_BSV: Tensor = module(
                None,
                tokens_BS.cuda(),
                encoder_padding=padding_BS,
                decoder_padding=decoder_padding_BS.cuda(),
                encoder_hidden_states=encoded,
            )
        return logits_BSV

    longest = num_tokens + 1  # the start token stands in front
    if full_window:
        longest = max(longest, int(model.args.decoder_seq_length))
    return Conditioned(logits, special.padding, -(-longest // multiple) * multiple)
