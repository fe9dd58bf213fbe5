"""What the Switch layers must know of the micro-batch under way: its noise key and loss tokens.

Both are set by the forward step and must be found again when activations are recomputed, at a time
when another micro-batch is under way. Megatron's recompute saves and restores the states of its RNG
tracker around every recomputed part, so what sits among those states always belongs to the forward
pass that runs or is repeated. Numbers are stored there as eight bytes under names of their own. No
generator is ever forked under these names, so Megatron never takes them for generator states.
(Capturing CUDA graphs, it would: :mod:`megatron_switch.moe.switch_mlp` refuses those cases.)

Step key
    Jitter and expert dropout are keyed by (seed, iteration, micro-batch), so that noise is the same
    in every layout and bit-equal after a resume.

Loss tokens
    With ``--calculate-per-token-loss`` Megatron divides all gradients of a step by the tokens in
    the loss, over all micro-batches and ranks. For router losses to be a mean over micro-batches,
    weighted like the loss, a router multiplies them by the tokens in the loss of *its* micro-batch.
    It cannot count them: padding, ends of documents and masked prompts are routed or not, and
    counted or not, independently. (Megatron's own router multiplies by the tokens that it routes,
    which makes its losses too strong or too weak by the ratio.) The count stays on the device, so
    that the host waits for nothing; the tracker's states carry the id of the micro-batch, by which
    the count is looked up here.
"""

import itertools

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from megatron_switch.upstream.private import with_values

_STEP_KEY, _LOSS_TOKENS_ID = "switch-step-key", "switch-loss-tokens"
_NUM_BYTES = 8
_MAX_COUNTS = 1 << 14
"""Micro-batches whose count is kept: more than any pipeline has in flight."""

_ids = itertools.count(1)
_loss_tokens: dict[int, Tensor] = {}


def set_step_key(key: int) -> None:
    """Make ``key`` (a signed 64-bit integer) the key of the micro-batch that starts now."""
    _store(_STEP_KEY, key)


def step_key() -> int:
    """Return the key of the micro-batch whose forward pass runs now, 0 if none was set."""
    return _load(_STEP_KEY)


def set_loss_tokens(count: Tensor) -> None:
    """Set the number of tokens in the loss of the micro-batch that starts now.

    Args:
        count: Scalar, float32, on any device: of the whole micro-batch, over all its ranks.
    """
    micro_batch_id = next(_ids)
    _loss_tokens[micro_batch_id] = count.detach()
    _loss_tokens.pop(micro_batch_id - _MAX_COUNTS, None)
    _store(_LOSS_TOKENS_ID, micro_batch_id)


def loss_tokens() -> Tensor | None:
    """Return the tokens in the loss of the micro-batch whose forward pass runs now, float32.

    None if it was not set, as inside another training program.
    """
    return _loss_tokens.get(_load(_LOSS_TOKENS_ID))


def _store(name: str, number: int) -> None:
    """Put a signed 64-bit integer among the tracker's states."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    number_bytes = number.to_bytes(_NUM_BYTES, "little", signed=True)
    with with_values():  # the host reads it back, also where all other tensors are fake
        states[name] = torch.tensor(list(number_bytes), dtype=torch.uint8, device="cpu")
    tracker.set_states(states)


def _load(name: str) -> int:
    """Return the number of that name among the states in force, 0 if there is none."""
    state = get_cuda_rng_tracker().get_states().get(name)
    if state is None:
        return 0
    return int.from_bytes(bytes(state.tolist()), "little", signed=True)
