"""Step key and loss tokens survive among Megatron's generator states, also in a recomputation."""

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.moe import micro_batch_state as module
from megatron_switch.moe.micro_batch_state import (
    loss_tokens,
    set_loss_tokens,
    set_step_key,
    step_key,
)


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


def test_without_a_count_there_are_no_loss_tokens():
    assert loss_tokens() is None


def test_the_last_count_is_read_back_on_its_device():
    set_loss_tokens(torch.tensor(3.0))
    set_loss_tokens(torch.tensor(5.0))
    assert torch.equal(loss_tokens(), torch.tensor(5.0))


def test_loss_tokens_and_step_key_are_apart():
    set_step_key(11)
    set_loss_tokens(torch.tensor(2.0))
    assert step_key() == 11
    assert float(loss_tokens()) == 2.0


def test_loss_tokens_travel_with_saved_states():
    set_loss_tokens(torch.tensor(1.0))
    saved = get_cuda_rng_tracker().get_states()
    set_loss_tokens(torch.tensor(2.0))
    get_cuda_rng_tracker().set_states(saved)
    assert float(loss_tokens()) == 1.0


def test_recomputing_sees_the_loss_tokens_of_its_own_micro_batch():
    seen = []

    def layer(x):
        seen.append(float(loss_tokens()))
        return x * x

    with cuda_on_cpu():
        outputs = []
        for number in (1.0, 2.0, 3.0):
            set_loss_tokens(torch.tensor(number))
            outputs.append(
                tensor_parallel.checkpoint(layer, False, torch.ones(2, requires_grad=True))
            )
        for output in outputs:
            output.sum().backward()
    assert seen == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]


def test_states_hold_an_id_and_no_tensor_of_the_device():
    set_loss_tokens(torch.tensor(1.0))
    (state,) = get_cuda_rng_tracker().get_states().values()
    assert (state.dtype, state.device.type, state.numel()) == (torch.uint8, "cpu", 8)


def test_old_loss_tokens_are_forgotten(monkeypatch):
    monkeypatch.setattr(module, "_MAX_COUNTS", 3)
    monkeypatch.setattr(module, "_loss_tokens", {})
    for number in range(10):
        set_loss_tokens(torch.tensor(float(number)))
    assert [float(count) for count in module._loss_tokens.values()] == [7.0, 8.0, 9.0]
