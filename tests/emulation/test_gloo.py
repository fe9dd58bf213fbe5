"""Unequal sizes over gloo give what NCCL gives, and all groups of a rank share one device."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.emulation.launch import import_megatron
from megatron_switch.testing.ranks import run_ranks

ROWS, WIDTH = (3, 0, 5), 2


@pytest.fixture(scope="module", autouse=True)
def _imported_before_the_fork():
    import_megatron()


def part(rank, other=0):
    """Rows that ``rank`` contributes, or keeps for ``other``."""
    start = 100 * rank + 10 * other
    return torch.arange(start, start + ROWS[other] * WIDTH, dtype=torch.float32).view(-1, WIDTH)


def test_gathers_unequal_sizes():
    run_ranks(_check_gather, len(ROWS))


def _check_gather(rank):
    mine = part(rank, rank)
    with cuda_on_cpu():
        gathered = [torch.empty(rows, WIDTH) for rows in ROWS]
        dist.all_gather(gathered, mine)
    torch.testing.assert_close(gathered, [part(each, each) for each in range(len(ROWS))])


def test_reduces_and_scatters_unequal_sizes():
    run_ranks(_check_reduce_scatter, len(ROWS))


def _check_reduce_scatter(rank):
    parts = [part(rank, other) for other in range(len(ROWS))]
    with cuda_on_cpu():
        output = torch.empty(ROWS[rank], WIDTH)
        dist.reduce_scatter(output, parts)
    expected = torch.stack([part(each, rank) for each in range(len(ROWS))]).sum(dim=0)
    torch.testing.assert_close(output, expected)


def test_unequal_sizes_are_refused_without_the_emulation():
    with pytest.raises(Exception, match="invalid tensor size"):
        run_ranks(_gather_without_emulation, 2)


def _gather_without_emulation(rank):
    dist.all_gather([torch.empty(1), torch.empty(2)], torch.zeros(rank + 1))


def test_equal_sizes_may_be_asynchronous():
    run_ranks(_check_equal, 2)


def _check_equal(rank):
    with cuda_on_cpu():
        gathered = [torch.empty(2), torch.empty(2)]
        dist.all_gather(gathered, torch.full((2,), float(rank)), async_op=True).wait()
        output = torch.empty(2)
        dist.reduce_scatter(output, [torch.ones(2), torch.ones(2)], op=dist.ReduceOp.SUM)
    assert [each.tolist() for each in gathered] == [[0.0, 0.0], [1.0, 1.0]]
    assert output.tolist() == [2.0, 2.0]


def test_split_sizes_may_be_tensors():
    run_ranks(_check_split_sizes, 2)


def _check_split_sizes(rank):
    sent = torch.tensor([1, 2]) if rank == 0 else torch.tensor([3, 1])
    received = torch.tensor([1, 3]) if rank == 0 else torch.tensor([2, 1])
    values = torch.arange(int(sent.sum())) + 10 * rank
    output = torch.empty(int(received.sum()), dtype=torch.int64)
    with cuda_on_cpu():
        dist.all_to_all_single(output, values, received, input_split_sizes=sent)
    assert output.tolist() == ([0, 10, 11, 12] if rank == 0 else [1, 2, 13])


def backend(group):
    return group._get_backend(torch.device("cpu"))


def check_groups(rank):
    before = distributed_c10d.ProcessGroupGloo
    with cuda_on_cpu():
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=41))
        others = [dist.new_group(ranks) for ranks in ([0, 1, 2], [0], [2, 1])]
        groups = [group for group in (pair, *others) if group != dist.GroupMember.NON_GROUP_MEMBER]
        devices = {id(device) for group in groups for device in backend(group).options._devices}
        assert len(devices) == 1
        assert all(
            isinstance(backend(group), distributed_c10d.ProcessGroupGloo) for group in groups
        )
        if rank < 2:
            assert backend(pair).options._timeout == timedelta(seconds=41)
        for group in groups:
            members = dist.get_process_group_ranks(group)
            values = torch.tensor([float(rank)])
            dist.all_reduce(values, group=group)
            assert values.item() == sum(members)
        dist.barrier()
    assert distributed_c10d.ProcessGroupGloo is before


def test_groups_of_a_rank_share_one_device():
    run_ranks(check_groups, 3)


def check_own_devices(rank):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    devices = [device for group in groups for device in backend(group).options._devices]
    assert len({id(device) for device in devices}) == 2


def test_without_the_emulation_every_group_has_its_own():
    """What the patch is there for; once this fails, it can go."""
    run_ranks(check_own_devices, 2)
