"""Text generation from any causal model: which token comes next, and the loop around it.

Nothing here knows Megatron: a model is a function from tokens to logits. There is no key-value
cache. Every step feeds one window of fixed width, filled up with padding on the right, which a
causal model cannot see from the left; so shapes never change, whatever the layout, and a text
longer than the window goes on with its last tokens only.

Tokens are drawn on the CPU in float32 and with a CPU generator, so that a seed gives the same
text on every device, and ranks that hold the same logits agree without communication.

Shape letters: B sequences, S positions of the window, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_switch.errors import CheckpointError, ConfigError

ModelForward = Callable[[Tensor, Tensor], Tensor]
"""``(tokens_BS int64, padding_BS bool) -> logits_BSV``; padding is True where there is no token."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the model's probabilities.

    Filters apply in this order: temperature, then the ``top_k`` likeliest tokens, then of these
    the likeliest that together reach ``top_p``.

    Attributes:
        temperature: Divides the logits; 0 always takes the likeliest token.
        top_k: Number of tokens to choose from; None for all.
        top_p: Probability in (0, 1] that the tokens to choose from reach together.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):  # nan is neither
            raise ConfigError(
                "A temperature is a number of at least 0 (0 takes the likeliest token), got "
                f"--temperature {self.temperature}."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"At least one token must be left to choose from, got --top-k {self.top_k}. "
                "Leave it out to choose from all."
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"A probability to reach is above 0 and at most 1, got --top-p {self.top_p}. "
                "Leave it out to choose from all."
            )


GREEDY = Sampling(temperature=0.0)
"""Always the likeliest token; of equally likely ones the one with the lowest number."""


def token_probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution that the next token is drawn from.

    Args:
        logits_BV: Scores before any softmax, shape (B, V), any floating type.
        sampling: Temperature and filters.

    Returns:
        Shape (B, V), float32, on the logits' device. Rows sum to one; what the filters leave
        out is exactly zero. Ties at a filter's edge go to the lowest token number.
    """
    logits_BV = logits_BV.float()
    if sampling.temperature == 0.0:
        chosen_B = logits_BV.argmax(dim=-1)
        return torch.nn.functional.one_hot(chosen_B, logits_BV.size(-1)).float()
    # Shifted first: a small temperature would otherwise overflow to infinity.
    shifted_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    probs_BV = (shifted_BV / sampling.temperature).softmax(dim=-1)
    if sampling.top_k is None and sampling.top_p == 1.0:
        return probs_BV
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        sorted_BV[:, sampling.top_k :] = 0.0
        sorted_BV /= sorted_BV.sum(dim=-1, keepdim=True)
    # A token stays while those before it have not reached top_p: the first one always does.
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    if sampling.top_p < 1.0:
        sorted_BV = sorted_BV.masked_fill(before_BV >= sampling.top_p, 0.0)
        sorted_BV /= sorted_BV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs_BV).scatter(-1, order_BV, sorted_BV)


def next_token(
    logits_BV: Tensor, sampling: Sampling, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return one token for each row of logits.

    Args:
        logits_BV: Scores before any softmax, shape (B, V), on any device.
        sampling: How to choose.
        generator: CPU generator to draw from; None is torch's default one.

    Returns:
        Shape (B,), int64, on the CPU.

    Raises:
        CheckpointError: If logits are not numbers, as those of a diverged model.
    """
    logits_BV = logits_BV.float().cpu()
    if logits_BV.isnan().any() or logits_BV.isposinf().any():
        raise CheckpointError(
            "The model's logits are not finite: its weights have diverged or are damaged. Load an "
            "earlier checkpoint with --ckpt-step."
        )
    probs_BV = token_probabilities(logits_BV, sampling)
    if sampling.temperature == 0.0:
        return probs_BV.argmax(dim=-1)
    return torch.multinomial(probs_BV, 1, generator=generator).squeeze(-1)


def window_width(num_tokens: int, *, context_length: int, multiple_of: int = 1) -> int:
    """Return the narrowest window that holds a whole text, or the widest that there is.

    Args:
        num_tokens: Prompt and continuation together, at least 1.
        context_length: Positions that the model has, a multiple of ``multiple_of``.
        multiple_of: What the width must divide by: the tensor-parallel size, with sequence
            parallelism.
    """
    assert context_length % multiple_of == 0, (context_length, multiple_of)
    rounded_up = -(-num_tokens // multiple_of) * multiple_of
    return min(rounded_up, context_length)


def generate_tokens(
    model_forward: ModelForward,
    prompt_ids: Sequence[int],
    *,
    window: int,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    padding_id: int = 0,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Continue a prompt, yielding each token as soon as it is known.

    Where several ranks share the model, all of them run this loop to its end with the same
    arguments and equally seeded generators, and ``model_forward`` gives all of them the same
    logits.

    Args:
        model_forward: The model, called without gradients on CPU tensors with B = 1.
        prompt_ids: Tokens of the prompt, at least one.
        window: Width S of every call; see :func:`window_width`.
        max_new_tokens: Where to stop.
        sampling: How to choose each token.
        vocab_size: Number of real tokens; the columns after them, padding of the embedding,
            are never chosen. None takes all columns.
        eod_id: Stop before yielding this token; None never does.
        padding_id: Token that fills the window; any one that the embedding has.
        generator: CPU generator to draw from; None is torch's default one.

    Yields:
        New tokens, without the prompt and without ``eod_id``.

    Raises:
        ConfigError: If the prompt is empty.
        CheckpointError: If the model's logits are not numbers.
    """
    if not prompt_ids:
        raise ConfigError(
            "A continuation needs at least one token to start from, got an empty --prompt."
        )
    text = list(prompt_ids)
    for _ in range(max_new_tokens):
        seen = text[-window:]
        tokens_BS = torch.full((1, window), padding_id, dtype=torch.int64)
        tokens_BS[0, : len(seen)] = torch.tensor(seen)
        padding_BS = torch.arange(window).unsqueeze(0) >= len(seen)
        with torch.no_grad():
            logits_BSV = model_forward(tokens_BS, padding_BS)
        logits_BV = logits_BSV[:, len(seen) - 1, :vocab_size]
        token = int(next_token(logits_BV, sampling, generator=generator))
        if token == eod_id:
            return
        text.append(token)
        yield token
