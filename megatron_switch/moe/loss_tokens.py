"""How many tokens of a micro-batch count in the loss, for routers that weigh their losses by it.

With ``--calculate-per-token-loss`` Megatron divides all gradients of a step by the tokens in the
loss, over all micro-batches and ranks. For the router's losses to be a mean over micro-batches,
each weighed like its part of that loss, a router must multiply them by the tokens in the loss of
*its* micro-batch. It cannot count them: padding, ends of documents and masked prompts are routed or
not, and counted or not, independently. (Megatron's own router multiplies by the tokens that it
routes, so that its losses are too strong, or too weak, by the ratio.)

Recompute must find the number of the forward pass that it repeats, although other micro-batches
have come in between. What Megatron's recompute brings back is the states of its RNG tracker; they
carry a ticket (:mod:`megatron_switch.moe.step_key`), and the numbers wait here under their tickets.
They stay on the device, so that the host waits for nothing, and out of checkpoints, to which the
tracker's states go.
"""

import itertools

from torch import Tensor

from megatron_switch.moe.step_key import carried, carry

_NAME = "switch-loss-tokens"
_KEPT = 1 << 14
"""Micro-batches whose number is kept: more than any pipeline has under way."""

_tickets = itertools.count(1)
_counts: dict[int, Tensor] = {}


def set_loss_tokens(count: Tensor) -> None:
    """Say how many tokens are in the loss of the micro-batch that starts now.

    Args:
        count: Scalar, float32, on any device: of the whole micro-batch, over all its ranks.
    """
    ticket = next(_tickets)
    _counts[ticket] = count.detach()
    _counts.pop(ticket - _KEPT, None)
    carry(_NAME, ticket)


def loss_tokens() -> Tensor | None:
    """Return the tokens in the loss of the micro-batch whose forward pass runs now, float32.

    None where nobody has said so: inside another training program.
    """
    return _counts.get(carried(_NAME))
