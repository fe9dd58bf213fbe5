"""What an expert is for, told by the tokens that are sent to it.

Raw counts say little: every expert sees many commas. The *lift* of a token for an expert is how
many times more often the token goes there than tokens in general do,

    lift(t, e) = P(e | t) / P(e) = n(t, e) * N / (n(t) * n(e)).

A lift of 1 / P(e) is the most that there can be: all of a token's occurrences go to the expert.
Rare tokens reach it by chance, so only tokens seen often count; of tokens that reach it, or any
other lift, together, the one that the expert gets more often comes first.

Shape letters: T tokens observed, V vocabulary, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLift:
    """A token that prefers an expert."""

    token: int
    """Index in the vocabulary."""
    lift: float
    """How many times more often than tokens in general it goes to the expert."""
    share: float
    """Fraction of its occurrences that went to the expert, P(e | t)."""
    count: int
    """Occurrences that went to the expert."""


def highest_lifts(
    token_T: Tensor, expert_T: Tensor, *, num_experts: int, num_tokens: int, min_count: int
) -> list[list[TokenLift]]:
    """Return for each expert the tokens with the highest lift, best first.

    Args:
        token_T: Token at the router's input, shape (T,), int64.
        expert_T: Expert that the router chose for it, shape (T,), int64, in [0, E).
        num_experts: Experts in the layer.
        num_tokens: Most tokens to return for an expert.
        min_count: Least occurrences of a token, over all experts, to be considered.

    Returns:
        One list for each expert; equal lifts are ordered by count, then by token.
    """
    vocabulary, index_T = torch.unique(token_T, return_inverse=True)
    pair_T = index_T * num_experts + expert_T
    counts_VE = torch.bincount(pair_T, minlength=len(vocabulary) * num_experts)
    counts_VE = counts_VE.view(-1, num_experts)
    often_V = counts_VE.sum(dim=1) >= min_count
    by_token_V1 = counts_VE.sum(dim=1, keepdim=True).clamp(min=1)
    by_expert_E = counts_VE.sum(dim=0).clamp(min=1)
    lift_VE = counts_VE.double() * len(token_T) / (by_token_V1 * by_expert_E)
    share_VE = counts_VE.double() / by_token_V1
    best = []
    for expert in range(num_experts):
        candidates = [
            TokenLift(
                token=int(vocabulary[v]),
                lift=float(lift_VE[v, expert]),
                share=float(share_VE[v, expert]),
                count=int(counts_VE[v, expert]),
            )
            for v in torch.nonzero(often_V & (lift_VE[:, expert] > 1.0)).flatten().tolist()
        ]
        # For one expert the same order as that of lifts, and what is equal is so to the last bit.
        candidates.sort(key=lambda one: (-one.share, -one.count, one.token))
        best.append(candidates[:num_tokens])
    return best
