"""Every collective of torch is seen with its group and its bytes, and summed for reading."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_switch import parallel_state
from megatron_switch.rehearsal.collective_trace import CollectiveCall, CollectiveTotal, totals
from megatron_switch.rehearsal.observer import StepObserver
from megatron_switch.testing.ranks import run_ranks


def call(kind, group, members, num_bytes):
    return CollectiveCall(kind, group, tuple(members), num_bytes)


def test_calls_are_summed_by_kind_and_group_and_lonely_groups_left_out():
    calls = [
        call("all-to-all", "ep", range(16), 100),
        call("all-reduce", "tp", range(4), 300),
        call("all-to-all", "ep", range(16), 150),
        call("all-reduce", "ep", range(16), 1),
        call("all-reduce", "cp", [0], 10**6),
    ]
    assert totals(calls, ranks_per_node=8) == [
        CollectiveTotal("all-reduce", "tp", 4, 1, 1, 300),
        CollectiveTotal("all-to-all", "ep", 16, 2, 2, 250),
        CollectiveTotal("all-reduce", "ep", 16, 2, 1, 1),
    ]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_each_kind_is_seen_with_the_larger_side():
    run_ranks(_check_kinds, 2)


def _check_kinds(rank):
    parallel_state.initialize_model_parallel()
    one, two = torch.ones(4), torch.ones(8)
    observer = StepObserver()
    with observer:
        observer.begin([], _NoOptimizer())
        dist.all_reduce(one)
        dist.all_gather_into_tensor(two, one)
        dist.all_gather([torch.empty(4), torch.empty(4)], one)
        dist.reduce_scatter_tensor(torch.empty(4), two)
        dist.all_to_all_single(torch.empty(6), two[:6], [3, 3], [3, 3])
        dist.broadcast(one, 0)
        if rank == 0:
            dist.send(one, 1)
        else:
            dist.recv(one, 0)
        dist.all_reduce(
            two.bfloat16(), group=dist.new_group([rank], use_local_synchronization=True)
        )
    calls = observer.end([], {}).calls
    assert [(each.group, each.members) for each in calls[-2:]] == [
        ("world", (0, 1)),
        ("tp", (rank,)),  # not Megatron's, but with the same members
    ]
    assert [(each.kind, each.num_bytes) for each in calls] == [
        ("all-reduce", 16),
        ("all-gather", 32),
        ("all-gather", 32),
        ("reduce-scatter", 32),
        ("all-to-all", 24),
        ("broadcast", 16),
        ("send" if rank == 0 else "receive", 16),
        ("all-reduce", 16),
    ]


class _NoOptimizer:
    chained_optimizers = ()


def test_operations_of_products_are_counted_apart_forward_and_backward():
    observer = StepObserver()
    layer = nn.Linear(16, 8, bias=False)
    with observer:
        observer.begin([layer], _NoOptimizer())
        layer(torch.ones(4, 16, requires_grad=True)).sum().backward()
    seen = observer.end([layer], {})
    assert seen.forward_flops == 2 * 4 * 16 * 8
    assert seen.backward_flops == 2 * seen.forward_flops
    assert seen.parameters == {"dense": 128, "expert": 0}
