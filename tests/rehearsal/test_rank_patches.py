"""A rehearsal's patches are counted, reasoned, applied together and all undone."""

import importlib
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.rehearsal import fsdp, host_offload, patches
from megatron_switch.rehearsal.memory import LiveMemory
from megatron_switch.rehearsal.observer import StepObserver
from megatron_switch.testing.ranks import run_ranks

NUM_PATCHES = {"torch": 3, "megatron": 4}
"""A new patch needs a reason; so does this number."""


def current(target):
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    return inspect.getattr_static(owner, name)


def all_patches():
    return [
        *patches.rehearsal_patches(bool),
        *patches.step_patches(StepObserver(), print),
        *patches.sample_patches({}),
        *host_offload.offload_patches(LiveMemory()),
        *fsdp.sharding_patches(LiveMemory()),
    ]


def test_number_of_patches():
    packages = [p.target.partition(".")[0] for p in patches.rehearsal_patches(bool)]
    assert {name: packages.count(name) for name in packages} == NUM_PATCHES
    assert len(patches.step_patches(StepObserver(), print)) == 1
    assert len(patches.sample_patches({})) == 1
    assert len(host_offload.offload_patches(LiveMemory())) == 7
    assert len(fsdp.sharding_patches(LiveMemory())) == 6


def test_every_patch_is_applied_and_undone():
    targets = [patch.target for patch in all_patches()]
    originals = {target: current(target) for target in targets}
    with (
        patches.one_of_many_ranks(bool),
        patches.observed_steps(StepObserver(), print),
        patches.known_samples({}),
        host_offload.host_memory(LiveMemory()),
        fsdp.cut_over_ranks(LiveMemory()),
    ):
        for target in targets:
            assert current(target) is not originals[target], target
    for target in targets:
        assert current(target) is originals[target], target


def test_modules_without_values_are_converted_in_place():
    with cuda_on_cpu(), patches.one_of_many_ranks(bool), FakeTensorMode():
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        weight = module[0].weight
        assert module.bfloat16() is module
        assert module[0].weight is weight
        assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
        buffers = dict(module.named_buffers())
        assert buffers["1.running_mean"].dtype == torch.bfloat16
        assert buffers["1.num_batches_tracked"].dtype == torch.int64


def test_only_groups_of_this_rank_are_made():
    run_ranks(_check_groups, 2)


def _check_groups(rank):
    with patches.one_of_many_ranks(bool):
        mine, other = dist.new_group([rank]), dist.new_group([1 - rank])
        assert dist.get_process_group_ranks(mine) == [rank]
        assert other is dist.GroupMember.NON_GROUP_MEMBER
        gathered = [None, None]
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": rank}] * 2


@pytest.mark.parametrize("count", [1, 3])
def test_the_norm_of_gradients_is_the_one_that_megatron_computes(count):
    from megatron.core.utils import local_multi_tensor_l2_norm

    gradients = [[torch.randn(5, 3) for _ in range(count)]]
    (norm_patch,) = [
        p for p in patches.rehearsal_patches(bool) if p.target.endswith("l2_norm_impl")
    ]
    with cuda_on_cpu():
        ours, _ = norm_patch.replacement(0, torch.zeros(1), gradients, False)
        theirs, _ = local_multi_tensor_l2_norm(0, torch.zeros(1), gradients, False)
    torch.testing.assert_close(ours, theirs)
