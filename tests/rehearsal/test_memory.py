"""Live storages are counted once, from their first tensor to the last view of them, by kind."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.rehearsal.memory import KINDS, LiveMemory, held_by
from megatron_switch.rehearsal.observer import StepObserver

KB = 1024


def by_kind(memory):
    return {kind: size for kind, size in memory.peak().by_kind.items() if size}


@pytest.fixture(params=["real", "fake"])
def observer(request):
    """An observer that sees real tensors, or fake ones."""
    watching = StepObserver()
    if request.param == "real":
        with watching:
            yield watching
    else:
        with FakeTensorMode(), watching:
            yield watching


def test_a_storage_counts_once_whatever_views_it_has(observer):
    tensor = torch.empty(KB, dtype=torch.uint8)
    views = [tensor.view(2, 512), tensor[:10], tensor.detach()]
    assert observer.memory.peak().total == KB
    del tensor
    other = torch.empty(KB, dtype=torch.uint8)  # the views keep the first alive
    assert observer.memory.peak().total == 2 * KB
    del views, other
    again = [torch.empty(KB, dtype=torch.uint8) for _ in range(2)]
    assert observer.memory.peak().total == 2 * KB
    assert len(again) == 2


def test_what_lives_is_told_apart_and_the_peak_starts_anew(observer):
    memory = observer.memory
    weight = torch.empty(KB, dtype=torch.uint8)
    moment = torch.empty(2 * KB, dtype=torch.uint8)
    gone = torch.empty(8 * KB, dtype=torch.uint8)
    del gone
    state = memory.classify({"dense weights": [weight[:5]], "dense optimizer": [moment, weight]})
    assert state == {"dense weights": KB, "dense optimizer": 2 * KB}
    assert by_kind(memory) == state
    rest = torch.empty(4 * KB, dtype=torch.uint8)
    assert by_kind(memory) == {**state, "other": 4 * KB}
    del rest


def test_recomputed_activations_are_activations_and_the_rest_of_a_backward_pass_is_not(observer):
    memory = observer.memory
    made = {}

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            made["backward"] = torch.empty(KB, dtype=torch.uint8)
            with torch.enable_grad():
                made["recomputed"] = torch.empty(2 * KB, dtype=torch.uint8)
            return gradient

    x = torch.ones(1, requires_grad=True)
    memory.classify({})
    memory.in_forward_backward = True
    loss = Probe.apply(x)
    made["forward"] = torch.empty(4 * KB, dtype=torch.uint8)
    loss.backward()
    memory.in_forward_backward = False
    made["between"] = torch.empty(8 * KB, dtype=torch.uint8)
    peak = memory.peak().by_kind
    assert peak["activations"] // KB == 6
    assert peak["backward"] // KB == 1
    assert peak["other"] // KB == 8


def test_what_is_made_on_the_host_is_counted_apart_and_so_is_what_is_computed_from_it(observer):
    memory = observer.memory
    with memory.making("host"):
        master = torch.zeros(KB, dtype=torch.uint8)
    assert memory.is_on_host(master[:5])
    memory.classify({"dense optimizer": [master]})
    moment = torch.zeros_like(master)
    on_device = torch.empty(2 * KB, dtype=torch.uint8)
    on_device[:KB].copy_(master)
    assert memory.is_on_host(moment)
    assert not memory.is_on_host(on_device)
    assert memory.peak().total == 2 * KB
    assert memory.peak().host == 2 * KB
    del moment
    assert memory.peak().host == 2 * KB  # the most that there was


def test_memory_that_is_given_back_and_taken_again_counts_while_it_is_there(observer):
    memory = observer.memory
    with memory.making("gathered"):
        bucket = torch.empty(4 * KB, dtype=torch.uint8)
    bucket.untyped_storage().resize_(0)
    memory.resized(bucket)
    memory.classify({})
    assert memory.peak().total == 0
    bucket.untyped_storage().resize_(4 * KB)
    memory.resized(bucket)
    assert by_kind(memory) == {"gathered": 4 * KB}


class _Inner:
    def __init__(self, group, state):
        self.param_groups = [group]
        self.state = state


class _Member:
    def __init__(self, inner):
        self.optimizer = inner


class _Chain:
    def __init__(self, *members):
        self.chained_optimizers = members


def test_state_is_found_where_model_and_optimizer_hold_it():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(3, 3, bias=False)])
    dense, expert = model.parameters()
    expert.allreduce = False
    dense.main_grad = torch.zeros(2, 2)
    expert.grad = torch.zeros(3, 3)
    master, moment = torch.zeros(4), torch.zeros(4)
    groups = [
        {"params": [master], "is_expert_parallel": False},
        {"params": [expert], "is_expert_parallel": True},
    ]
    states = [{master: {"exp_avg": moment, "step": 3}}, {}]
    members = [_Member(_Inner(*pair)) for pair in zip(groups, states, strict=True)]
    held = held_by(model, _Chain(*members, _Member(None)))
    found = {kind: [id(tensor) for tensor in tensors] for kind, tensors in held.items()}
    assert found == {
        "dense weights": [id(dense)],
        "expert weights": [id(expert)],
        "dense gradients": [id(dense.main_grad)],
        "expert gradients": [id(expert.grad)],
        "dense optimizer": [id(master), id(moment)],
        "expert optimizer": [id(expert)],
    }
    state = LiveMemory().classify(held)
    assert state["expert weights"] == 36
    assert state["expert optimizer"] == 0  # in fp32 the parameter is its own master
    assert tuple(held) == KINDS[:6]
