"""Groups that the emulation makes work as torch's do, on one device a rank."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.testing.ranks import run_ranks


def gloo(group):
    return group._get_backend(torch.device("cpu"))


def check_groups(rank):
    before = distributed_c10d.ProcessGroupGloo
    with cuda_on_cpu():
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=41))
        others = [dist.new_group(ranks) for ranks in ([0, 1, 2], [0], [2, 1])]
        groups = [group for group in (pair, *others) if group != dist.GroupMember.NON_GROUP_MEMBER]
        devices = {id(device) for group in groups for device in gloo(group).options._devices}
        assert len(devices) == 1
        assert all(isinstance(gloo(group), distributed_c10d.ProcessGroupGloo) for group in groups)
        if rank < 2:
            assert gloo(pair).options._timeout == timedelta(seconds=41)
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
    devices = [device for group in groups for device in gloo(group).options._devices]
    assert len({id(device) for device in devices}) == 2


def test_without_the_emulation_every_group_has_its_own():
    """What the patch is there for; once this fails, it can go."""
    run_ranks(check_own_devices, 2)
