"""Specialisation of experts, measured by the lift of the tokens that are routed to them.

Raw counts show little: every expert sees many commas. The *lift* of a token for an expert is how
many times more often the token is routed there than tokens in general are,

    lift(t, e) = P(e | t) / P(e) = n(t, e) * N / (n(t) * n(e)).

Its maximum is 1 / P(e): all of a token's occurrences go to the expert. Rare tokens reach it by
chance, so only frequent tokens count; of equal lifts the more frequent token comes first.

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
        # By share: for one expert the same order as by lift, and ties are exact.
        candidates.sort(key=lambda one: (-one.share, -one.count, one.token))
        best.append(candidates[:num_tokens])
    return best
