"""The step key survives among Megatron's generator states, whoever saves and restores them."""

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.moe.step_key import set_step_key, step_key


@pytest.fixture(autouse=True)
def _fresh_tracker():
    get_cuda_rng_tracker().reset()
    yield
    get_cuda_rng_tracker().reset()


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_the_last_key_is_read_back(key):
    assert step_key() == 0
    set_step_key(5)
    set_step_key(key)
    assert step_key() == key


def test_keys_travel_with_saved_states():
    set_step_key(1)
    saved = get_cuda_rng_tracker().get_states()
    set_step_key(2)
    get_cuda_rng_tracker().set_states(saved)
    assert step_key() == 1


def test_keys_pass_through_checkpoints(tmp_path):
    set_step_key(-3)
    torch.save(get_cuda_rng_tracker().get_states(), tmp_path / "states.pt")
    get_cuda_rng_tracker().reset()
    states = torch.load(tmp_path / "states.pt", weights_only=True)
    # As Megatron's loader does with every state it finds.
    states = {name: tensor_parallel.convert_cuda_rng_state(s) for name, s in states.items()}
    get_cuda_rng_tracker().set_states(states)
    assert step_key() == -3


def test_keys_are_numbers_where_tensors_are_fake():
    with FakeTensorMode():
        set_step_key(9)
        assert step_key() == 9


def test_recomputing_sees_the_key_of_its_forward_pass():
    with cuda_on_cpu():
        seen = []

        def layer(x):
            seen.append(step_key())
            return x * 2.0

        leaf = torch.ones(1, requires_grad=True)
        set_step_key(1)
        output = tensor_parallel.checkpoint(layer, False, leaf)
        set_step_key(2)
        output.sum().backward()
        assert seen == [1, 1]
        assert step_key() == 2
