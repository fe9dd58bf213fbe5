"""Router losses weigh a micro-batch by its tokens in the loss, also when it is computed again."""

import pytest
import torch
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.moe import loss_tokens as module
from megatron_switch.moe.loss_tokens import loss_tokens, set_loss_tokens
from megatron_switch.moe.step_key import set_step_key, step_key


@pytest.fixture(autouse=True)
def _fresh_tracker():
    get_cuda_rng_tracker().reset()
    yield
    get_cuda_rng_tracker().reset()


def test_nobody_has_said_so():
    assert loss_tokens() is None


def test_the_last_number_is_read_back_on_its_device():
    set_loss_tokens(torch.tensor(3.0))
    set_loss_tokens(torch.tensor(5.0))
    assert torch.equal(loss_tokens(), torch.tensor(5.0))


def test_it_lives_beside_the_step_key():
    set_step_key(11)
    set_loss_tokens(torch.tensor(2.0))
    assert step_key() == 11
    assert float(loss_tokens()) == 2.0


def test_numbers_travel_with_saved_states():
    set_loss_tokens(torch.tensor(1.0))
    saved = get_cuda_rng_tracker().get_states()
    set_loss_tokens(torch.tensor(2.0))
    get_cuda_rng_tracker().set_states(saved)
    assert float(loss_tokens()) == 1.0


def test_recompute_finds_the_number_of_its_own_micro_batch():
    seen = []

    def layer(x):
        seen.append(float(loss_tokens()))
        return x * x

    with cuda_on_cpu():
        outputs = []
        for number in (1.0, 2.0, 3.0):
            set_loss_tokens(torch.tensor(number))
            outputs.append(checkpoint(layer, False, torch.ones(2, requires_grad=True)))
        for output in outputs:
            output.sum().backward()
    assert seen == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]


def test_states_hold_a_ticket_and_no_tensor_of_the_device():
    set_loss_tokens(torch.tensor(1.0))
    (state,) = get_cuda_rng_tracker().get_states().values()
    assert (state.dtype, state.device.type, state.numel()) == (torch.uint8, "cpu", 8)


def test_old_numbers_are_let_go(monkeypatch):
    monkeypatch.setattr(module, "_KEPT", 3)
    monkeypatch.setattr(module, "_counts", {})
    for number in range(10):
        set_loss_tokens(torch.tensor(float(number)))
    assert [float(count) for count in module._counts.values()] == [7.0, 8.0, 9.0]
