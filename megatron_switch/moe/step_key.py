"""The number that jitter and expert dropout are keyed by, carried in Megatron's RNG tracker.

Noise must be the same in every layout and bit-equal after a resume, so it is drawn from a counter
keyed by (seed, iteration, micro-batch), not from a rank's random stream. It must also be the same
when activations are recomputed, at a time when another micro-batch is under way. Megatron's
recompute saves and restores the states of its RNG tracker around every recomputed part; a key that
sits among those states is therefore always the one of the forward pass being repeated.

The key is stored as eight bytes under a name of its own, and no generator is ever forked under that
name, so Megatron never takes it for a generator state. (Capturing CUDA graphs, it would; they and
noise exclude each other anyway, see :mod:`megatron_switch.moe.switch_mlp`.)
"""

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch._subclasses.fake_tensor import unset_fake_temporarily

_NAME = "switch-step-key"
_NUM_BYTES = 8


def set_step_key(key: int) -> None:
    """Make ``key`` (a signed 64-bit integer) the key of the micro-batch that starts now."""
    carry(_NAME, key)


def step_key() -> int:
    """Return the key of the micro-batch whose forward pass runs now, 0 if none was set."""
    return carried(_NAME)


def carry(name: str, number: int) -> None:
    """Put a signed 64-bit integer among the tracker's states, under a name of its own."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    number_bytes = number.to_bytes(_NUM_BYTES, "little", signed=True)
    with unset_fake_temporarily():  # readable also where all other tensors are fake
        states[name] = torch.tensor(list(number_bytes), dtype=torch.uint8, device="cpu")
    tracker.set_states(states)


def carried(name: str) -> int:
    """Return the number carried under ``name`` by the states in force, 0 if there is none."""
    state = get_cuda_rng_tracker().get_states().get(name)
    if state is None:
        return 0
    return int.from_bytes(bytes(state.tolist()), "little", signed=True)
