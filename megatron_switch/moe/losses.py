"""Auxiliary losses that keep Switch routing balanced and its logits small.

Both losses are pure functions of local tensors: they hold no state, start no communication, and
apply no coefficient, so logged values of runs with different coefficients can be compared. Each has
two forms: over the tokens given, and as one rank's share of a loss over tokens of several ranks.
Shares add up: the sum over ranks of shares is the loss, of their gradients the gradient. Gathering
the counts is the job of :mod:`megatron_switch.moe.router`, which knows the ranks.

Means are over real tokens; padding counts in nothing. A group without real tokens counts in no
mean, and the loss of no tokens is zero, with a gradient of zero.

For backward the load-balancing loss saves a weight per group and expert and an index per token, the
z-loss one number per token; the probabilities are saved by :mod:`megatron_switch.moe.routing`.

Shape letters:

    T  tokens on this rank            E  experts in the whole layer
    G  groups of tokens, for each of which balance is measured

Sources:
    Switch Transformer, https://arxiv.org/abs/2101.03961, equations (4)-(6).
    ST-MoE, https://arxiv.org/abs/2202.08906, router z-loss. It is not part of Switch.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_switch.errors import ConfigError
from megatron_switch.moe.routing import check_rows, count_tokens


def load_balancing_loss(
    probs_TE: Tensor,
    expert_T: Tensor,
    *,
    group_T: Tensor | None = None,
    padding_T: Tensor | None = None,
) -> Tensor:
    """Return the mean over groups of ``E * sum_e f_e * P_e``, which is 1.0 when balanced.

    ``f_e`` is the fraction of a group's tokens that chose expert ``e``, counted before any drop;
    ``P_e`` is the group's mean probability of expert ``e``. Only ``P_e`` carries a gradient.

    With ``group_T`` the host reads the number of groups; a caller that knows it uses
    :func:`load_balancing_share`.

    Args:
        probs_TE: Softmax over experts, shape (T, E), float32 (or float64).
        expert_T: Chosen expert of each token, shape (T,), integers in [0, E).
        group_T: Group of each token, shape (T,), any non-negative integers. Default: one group.
        padding_T: True for padding, shape (T,), bool. Default: no padding.

    Returns:
        Dimensionless scalar between 0 and E, dtype of ``probs_TE``; 0 if no token is real.

    Raises:
        ConfigError: If shapes disagree or a dtype is not as above.

    Source:
        Switch Transformer, arXiv:2101.03961, equations (4)-(6), with alpha = 1.
    """
    check_rows(probs_TE, group_T=group_T, padding_T=padding_T)
    if expert_T.shape != probs_TE.shape[:1]:
        raise ConfigError(
            f"Expected one expert a token, shape ({probs_TE.shape[0]},), got "
            f"{tuple(expert_T.shape)}."
        )
    num_groups = 1
    if group_T is not None:
        groups, group_T = torch.unique(group_T, return_inverse=True)
        num_groups = groups.numel()
    tokens_per_expert_GE = count_tokens(
        expert_T.long(),
        num_experts=probs_TE.shape[1],
        num_groups=num_groups,
        group_T=group_T,
        padding_T=padding_T,
    )
    return load_balancing_share(
        probs_TE, tokens_per_expert_GE, group_T=group_T, padding_T=padding_T
    )


def load_balancing_share(
    probs_TE: Tensor,
    tokens_per_expert_GE: Tensor,
    *,
    group_T: Tensor | None = None,
    padding_T: Tensor | None = None,
) -> Tensor:
    """Return what this rank's tokens contribute to a load-balancing loss over several ranks.

    With ``n_ge`` and ``T_g`` counted over all ranks, and ``p_e`` summed over the real tokens of
    this rank, that is the mean over groups of ``E / T_g^2 * sum_e n_ge * sum_t p_te``.

    Args:
        probs_TE: Softmax over experts of this rank's tokens, shape (T, E), float32 (or float64).
        tokens_per_expert_GE: Tokens of *all* ranks that chose each expert, before any drop and
            without padding, shape (G, E), integers. Its row sums are the groups' real tokens.
        group_T: Row of ``tokens_per_expert_GE`` that each token belongs to, shape (T,), integers.
            Default: all 0.
        padding_T: True for padding, shape (T,), bool. Default: no padding.

    Returns:
        Dimensionless scalar, dtype of ``probs_TE``.

    Raises:
        ConfigError: If shapes disagree or a dtype is not as above.
    """
    check_rows(probs_TE, group_T=group_T, padding_T=padding_T)
    num_tokens, num_experts = probs_TE.shape
    num_groups = tokens_per_expert_GE.shape[0]
    assert tokens_per_expert_GE.shape[1:] == (num_experts,), tokens_per_expert_GE.shape
    tokens_G = tokens_per_expert_GE.sum(dim=1)
    counted_groups = (tokens_G > 0).sum().clamp(min=1)
    tokens_G1 = tokens_G.clamp(min=1).unsqueeze(1).to(probs_TE.dtype)
    fraction_GE = tokens_per_expert_GE / tokens_G1
    weight_GE = fraction_GE * num_experts / tokens_G1 / counted_groups

    if group_T is None:
        group_T = torch.zeros(num_tokens, dtype=torch.int64, device=probs_TE.device)
    row_T = group_T.long()
    if padding_T is not None:  # padding points at one more row, of zeros
        weight_GE = torch.cat([weight_GE, weight_GE.new_zeros(1, num_experts)])
        row_T = row_T.masked_fill(padding_T, num_groups)
    share: Tensor = _WeightedSum.apply(probs_TE, weight_GE, row_T)
    return share


def router_z_loss(logits_TE: Tensor, *, padding_T: Tensor | None = None) -> Tensor:
    """Return the mean squared logsumexp of the logits.

    Args:
        logits_TE: Router logits, shape (T, E), float32 (or float64).
        padding_T: True for padding, shape (T,), bool. Default: no padding.

    Returns:
        Scalar, dtype of the logits; 0 if no token is real.

    Raises:
        ConfigError: If shapes disagree or a dtype is not as above.

    Source:
        ST-MoE, arXiv:2202.08906, router z-loss, with coefficient 1.
    """
    check_rows(logits_TE, padding_T=padding_T)
    return router_z_share(logits_TE.logsumexp(dim=1), padding_T=padding_T)


def router_z_share(
    logsumexp_T: Tensor, *, padding_T: Tensor | None = None, num_tokens: int | Tensor | None = None
) -> Tensor:
    """Return what this rank's tokens contribute to a z-loss over several ranks.

    Args:
        logsumexp_T: From :func:`~megatron_switch.moe.routing.router_probabilities`, shape (T,).
        padding_T: True for padding, shape (T,), bool. Default: no padding.
        num_tokens: Real tokens of *all* ranks. Default: those given here.

    Returns:
        Sum of squares over this rank's real tokens divided by ``num_tokens``, or by 1 if that is 0.
    """
    if padding_T is not None:
        logsumexp_T = logsumexp_T.masked_fill(padding_T, 0.0)
    if num_tokens is None:
        num_tokens = logsumexp_T.numel() if padding_T is None else (~padding_T).sum()
    divisor = num_tokens.clamp(min=1) if isinstance(num_tokens, Tensor) else max(num_tokens, 1)
    return logsumexp_T.square().sum() / divisor


class _WeightedSum(torch.autograd.Function):
    """Sum over tokens of probabilities times their group's weights, which take no gradient.

    Plain autograd would save the weights of each token, a second [T, E] tensor. The sum runs over
    tokens and not over groups first, because a floating-point scatter is not deterministic on CUDA.
    """

    @staticmethod
    def forward(ctx: Any, probs_TE: Tensor, weight_GE: Tensor, row_T: Tensor) -> Tensor:
        ctx.save_for_backward(weight_GE, row_T)
        return (probs_TE * weight_GE.index_select(0, row_T)).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight_GE, row_T = ctx.saved_tensors
        return grad * weight_GE.index_select(0, row_T), None, None
