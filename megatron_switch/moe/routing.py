"""Top-1 routing: which expert each token chose, with what probability, and in which slot.

Everything here is a function of one rank's tensors, in index form: besides the logits and the
probabilities no [tokens, experts] tensor is built, integer and boolean ones included. Slots cost
O(T log T), a stable sort. Nothing reads a value back to the host and no shape depends on one, so
these functions run in CUDA graphs and under fake tensors.

Guaranteed:

* Softmax over all experts, then the largest probability; ties go to the lowest expert index.
* Logits are float32, or float64 where a test needs a reference. Half precision is refused, because
  rounding makes ties of what were choices.
* Rows are in first-come order (batch-major). A later token never takes a slot from an earlier one,
  unless ``order="probability"`` asks for that.
* Padding takes no slot, is in no count, and is never kept.
* For backward, the probabilities are kept once and shared by gate, load-balancing loss and z-loss.

Shape letters:

    T  tokens on this rank            E  experts in the whole layer
    G  groups of tokens, over which capacity is counted

Sources:
    Switch Transformer, https://arxiv.org/abs/2101.03961, section 2.1, equations (1) and (2).
    Order by probability: Vision MoE, https://arxiv.org/abs/2106.05974, batch prioritized routing.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_switch.errors import ConfigError

_PADDING = -1
"""Slot of a padding row; real tokens have slots from 0."""


@dataclass(frozen=True)
class SwitchRouting:
    """The routing of T tokens, one entry per token; no [T, E] map."""

    expert_T: Tensor
    """Chosen expert, int64. Padding rows have one too, which nothing reads."""
    gate_T: Tensor
    """Router probability of the chosen expert, float32, differentiable."""
    slot_T: Tensor
    """Position within (group, expert), counted from 0, int64; -1 for padding."""
    kept_T: Tensor
    """True where ``slot_T < capacity`` and the token is not padding, bool."""
    tokens_per_expert_E: Tensor
    """Tokens that chose each expert, before any drop, padding excluded, int64."""
    capacity: int
    """Slots per expert and group."""


@dataclass(frozen=True)
class RoutedTokens:
    """What a router hands to a dispatcher. Rows are batch-major: row ``t = b * S_local + s``.

    Slots are final: they are counted over the whole capacity group, whichever ranks hold it, so a
    dispatcher never asks other ranks who came first.
    """

    routing: SwitchRouting
    """Expert, gate, slot and kept of every token; slots count over the whole capacity group."""
    group_T: Tensor
    """int64, capacity group of the token inside its micro-batch, in [0, num_groups)."""
    num_groups: int
    """Capacity groups of one micro-batch: 1, or the number of sequences."""
    capacity: int
    """Slots per expert and capacity group."""
    key_T: Tensor | None = None
    """int64, random key of the token; None where experts draw nothing."""


@dataclass(frozen=True)
class RouterProbabilities:
    """Softmax of the router's logits, and its normaliser."""

    probs_TE: Tensor
    """Probability of each expert, rows sum to one, dtype of the logits."""
    logsumexp_T: Tensor
    """Logarithm of the sum of exponentials of a token's logits, dtype of the logits."""


def route(
    logits_TE: Tensor,
    *,
    capacity: int,
    group_T: Tensor | None = None,
    padding_T: Tensor | None = None,
    order: Literal["first_come", "probability"] = "first_come",
) -> SwitchRouting:
    """Route each token to its most probable expert.

    Args:
        logits_TE: Router logits, shape (T, E), float32 (or float64), rows in first-come order.
        capacity: Slots per expert and group, at least 0.
        group_T: Group of each token, shape (T,), any non-negative integers; rows of a group need
            not be consecutive. Default: all tokens form one group.
        padding_T: True for padding, shape (T,), bool. Default: no padding.
        order: Who gets the low slots of an expert: the earlier token, or the one with the larger
            gate (on equal gates, the earlier one).

    Returns:
        The routing; ``gate_T`` carries the gradient to ``logits_TE``.

    Raises:
        ConfigError: If a shape, dtype, ``capacity`` or ``order`` is not as above.

    Source:
        Switch Transformer, arXiv:2101.03961, equations (1) and (2).
    """
    return route_probs(
        router_probabilities(logits_TE).probs_TE,
        capacity=capacity,
        group_T=group_T,
        padding_T=padding_T,
        order=order,
    )


def route_probs(
    probs_TE: Tensor,
    *,
    capacity: int,
    group_T: Tensor | None = None,
    padding_T: Tensor | None = None,
    order: Literal["first_come", "probability"] = "first_come",
) -> SwitchRouting:
    """Do what :func:`route` does, from probabilities that losses use as well.

    Args:
        probs_TE: ``router_probabilities(logits_TE).probs_TE``, shape (T, E).
        capacity: As in :func:`route`.
        group_T: As in :func:`route`.
        padding_T: As in :func:`route`.
        order: As in :func:`route`.

    Returns:
        The routing; ``gate_T`` carries the gradient to ``probs_TE``.

    Raises:
        ConfigError: As in :func:`route`.
    """
    check_rows(probs_TE, group_T=group_T, padding_T=padding_T)
    if capacity < 0:
        raise ConfigError(
            f"The capacity of an expert is at least 0 slots, got {capacity}. Set --switch-capacity "
            "or the capacity factors to a positive number."
        )
    if order not in ("first_come", "probability"):
        raise ConfigError(
            f"--switch-drop-order must be 'first_come' or 'probability', got {order!r}."
        )
    num_experts = probs_TE.shape[1]
    expert_T = probs_TE.detach().argmax(dim=1)
    # gather saves only the index for backward, and its scatter has no collisions.
    gate_T = probs_TE.gather(1, expert_T.unsqueeze(1)).squeeze(1)
    slot_T = assign_slots(
        expert_T,
        num_experts=num_experts,
        group_T=group_T,
        padding_T=padding_T,
        gate_T=gate_T if order == "probability" else None,
    )
    return SwitchRouting(
        expert_T=expert_T,
        gate_T=gate_T,
        slot_T=slot_T,
        kept_T=_kept(slot_T, capacity),
        tokens_per_expert_E=count_tokens(
            expert_T, num_experts=num_experts, padding_T=padding_T
        ).squeeze(0),
        capacity=capacity,
    )


def router_probabilities(logits_TE: Tensor) -> RouterProbabilities:
    """Return softmax and logsumexp of the logits; backward keeps one [T, E] tensor for both.

    Args:
        logits_TE: Router logits, shape (T, E), float32 (or float64).

    Returns:
        Probabilities and logsumexp, both differentiable.

    Raises:
        ConfigError: If the logits are not a (T, E) matrix of float32 or float64.
    """
    check_rows(logits_TE)
    probs_TE, logsumexp_T = _SoftmaxAndNormaliser.apply(logits_TE)
    return RouterProbabilities(probs_TE, logsumexp_T)


def assign_slots(
    expert_T: Tensor,
    *,
    num_experts: int,
    group_T: Tensor | None = None,
    padding_T: Tensor | None = None,
    gate_T: Tensor | None = None,
) -> Tensor:
    """Number the tokens of each (group, expert) from 0.

    Args:
        expert_T: Chosen experts, shape (T,), int64, in [0, num_experts).
        num_experts: Experts in the whole layer.
        group_T: Group of each token, shape (T,), non-negative integers. Default: one group.
        padding_T: True for padding, shape (T,), bool. Default: no padding.
        gate_T: If given, larger gates get lower slots, and earlier rows on equal gates; otherwise
            earlier rows get lower slots.

    Returns:
        Slots, shape (T,), int64; -1 for padding.
    """
    key_T = expert_T if group_T is None else group_T.long() * num_experts + expert_T
    if padding_T is not None:
        key_T = key_T.masked_fill(padding_T, _PADDING)  # sorts before all others
    if gate_T is None:
        sorted_key_T, row_T = key_T.sort(stable=True)
    else:
        # A stable sort by gate, then a stable one by key: by gate within each key.
        by_gate_T = gate_T.detach().argsort(descending=True, stable=True)
        sorted_key_T, place_T = key_T[by_gate_T].sort(stable=True)
        row_T = by_gate_T[place_T]
    # A slot is the distance from the start of the token's run of equal keys: a running maximum
    # carries the last start forward.
    place_T = torch.arange(key_T.numel(), device=key_T.device)
    starts_run_T = torch.ones_like(place_T, dtype=torch.bool)
    starts_run_T[1:] = sorted_key_T[1:] != sorted_key_T[:-1]
    run_start_T = place_T.where(starts_run_T, 0).cummax(dim=0).values
    slot_T = torch.empty_like(place_T).scatter_(0, row_T, place_T - run_start_T)
    return slot_T if padding_T is None else slot_T.masked_fill(padding_T, _PADDING)


def count_tokens(
    expert_T: Tensor,
    *,
    num_experts: int,
    num_groups: int = 1,
    group_T: Tensor | None = None,
    padding_T: Tensor | None = None,
) -> Tensor:
    """Count the real tokens of each group that chose each expert.

    Args:
        expert_T: Chosen experts, shape (T,), int64, in [0, num_experts).
        num_experts: Experts in the whole layer.
        num_groups: Number of groups, G.
        group_T: Group of each token, shape (T,), integers in [0, num_groups). Default: all 0.
        padding_T: True for padding, shape (T,), bool. Default: no padding.

    Returns:
        Counts before any drop, shape (G, E), int64.
    """
    bin_T = expert_T if group_T is None else group_T.long() * num_experts + expert_T
    real_T = torch.ones_like(bin_T) if padding_T is None else (~padding_T).long()
    # Not bincount: on CUDA it waits for the device.
    counts = torch.zeros(num_groups * num_experts, dtype=torch.int64, device=expert_T.device)
    return counts.scatter_add_(0, bin_T, real_T).view(num_groups, num_experts)


def shift_slots(
    routing: SwitchRouting, *, earlier_GE: Tensor, group_T: Tensor, capacity: int
) -> SwitchRouting:
    """Renumber slots where a group is spread over ranks.

    Only first-come slots can be continued by counts; slots by probability need the gates of the
    whole group (:func:`assign_slots` over gathered rows).

    Args:
        routing: Routing of this rank's tokens, with first-come slots counted from 0 on this rank.
        earlier_GE: Tokens of each group and expert that come before this rank's, shape (G, E),
            integers.
        group_T: Row of ``earlier_GE`` that holds for each token, shape (T,), integers.
        capacity: Slots per expert and group, over all ranks.

    Returns:
        The routing with ``slot_T``, ``kept_T`` and ``capacity`` of the whole group; padding stays
        -1, and ``tokens_per_expert_E`` still counts this rank's tokens.
    """
    earlier_T = earlier_GE[group_T.long(), routing.expert_T].long()
    real_T = routing.slot_T != _PADDING
    slot_T = (routing.slot_T + earlier_T).where(real_T, _PADDING)
    return replace(routing, slot_T=slot_T, kept_T=_kept(slot_T, capacity), capacity=capacity)


def check_rows(
    values_TE: Tensor, *, group_T: Tensor | None = None, padding_T: Tensor | None = None
) -> None:
    """Refuse tensors whose shapes disagree or whose types are not as documented.

    Args:
        values_TE: Logits or probabilities, to be of shape (T, E), E >= 1, float32 or float64.
        group_T: To be integers of shape (T,).
        padding_T: To be bool of shape (T,), True for padding.

    Raises:
        ConfigError: If one of them is not.
    """
    if values_TE.ndim != 2 or values_TE.shape[1] == 0:
        raise ConfigError(
            "Router logits and probabilities have shape (tokens, experts) with at least one "
            f"expert, got {tuple(values_TE.shape)}. Flatten sequence and batch first."
        )
    if values_TE.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"Router logits and probabilities must be float32, got {values_TE.dtype}: half "
            "precision turns close choices into ties. Compute the router in float32 "
            "(--moe-router-dtype fp32)."
        )
    rows = values_TE.shape[:1]
    if group_T is not None and (group_T.shape != rows or _not_integer(group_T)):
        raise ConfigError(
            f"Groups are one non-negative integer a token, shape ({rows[0]},), got "
            f"{tuple(group_T.shape)} of {group_T.dtype}."
        )
    if padding_T is not None and (padding_T.shape != rows or padding_T.dtype != torch.bool):
        raise ConfigError(
            f"A padding mask is one bool a token, True for padding, shape ({rows[0]},), got "
            f"{tuple(padding_T.shape)} of {padding_T.dtype}. A mask of numbers has no polarity: "
            "compare it with the padding value first."
        )


def _not_integer(values: Tensor) -> bool:
    return values.is_floating_point() or values.is_complex() or values.dtype == torch.bool


def _kept(slot_T: Tensor, capacity: int) -> Tensor:
    kept_T: Tensor = (slot_T != _PADDING) & (slot_T < capacity)
    return kept_T


class _SoftmaxAndNormaliser(torch.autograd.Function):
    """Softmax and logsumexp of rows: the gradient of the second is the first, saved once."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        probs_TE = logits_TE.softmax(dim=1)
        ctx.save_for_backward(probs_TE)
        # The largest probability is exp(largest logit - logsumexp): maxima are cheaper than exp.
        logsumexp_T = logits_TE.amax(dim=1) - probs_TE.amax(dim=1).log()
        return probs_TE, logsumexp_T

    @staticmethod
    def backward(ctx: Any, grad_probs_TE: Tensor, grad_logsumexp_T: Tensor) -> Tensor:
        (probs_TE,) = ctx.saved_tensors
        mean_grad_T = (probs_TE * grad_probs_TE).sum(dim=1) - grad_logsumexp_T
        grad_logits_TE: Tensor = probs_TE * (grad_probs_TE - mean_grad_T.unsqueeze(1))
        return grad_logits_TE
