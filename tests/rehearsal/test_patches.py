"""A rehearsal's patches are counted, reasoned, applied together and all undone."""

import importlib
import inspect
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.rehearsal import patches
from megatron_switch.rehearsal.memory import LiveMemory
from megatron_switch.rehearsal.observer import StepObserver
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.upstream.patching import applied

LISTS = {
    "single rank": patches.single_rank_patches(bool),
    "step": patches.step_patches(StepObserver(), print),
    "sample": patches.sample_patches({}),
    "offload": patches.offload_patches(LiveMemory()),
    "FSDP": patches.fsdp_patches(LiveMemory()),
}
NUMBERS = {
    "single rank": {"torch": 3, "megatron": 4},
    "step": {"megatron": 1},
    "sample": {"megatron": 1},
    "offload": {"megatron": 7},
    "FSDP": {"torch": 2, "megatron": 4},
}
"""A new patch needs a reason; so does a higher number."""


def current(target):
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    return inspect.getattr_static(owner, name)


@pytest.mark.parametrize("name", LISTS)
def test_the_number_of_patches_is_pinned(name):
    packages = [patch.target.partition(".")[0] for patch in LISTS[name]]
    assert {package: packages.count(package) for package in packages} == NUMBERS[name]


def test_every_patch_is_applied_and_undone():
    targets = [patch.target for each in LISTS.values() for patch in each]
    originals = {target: current(target) for target in targets}
    with ExitStack() as stack:
        for each in LISTS.values():
            stack.enter_context(applied(each))
        for target in targets:
            assert current(target) is not originals[target], target
    for target in targets:
        assert current(target) is originals[target], target


def test_modules_without_values_are_converted_in_place():
    with cuda_on_cpu(), applied(LISTS["single rank"]), FakeTensorMode():
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
    with applied(LISTS["single rank"]):
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
    (norm_patch,) = [p for p in LISTS["single rank"] if p.target.endswith("l2_norm_impl")]
    with cuda_on_cpu():
        ours, _ = norm_patch.replacement(0, torch.zeros(1), gradients, False)
        theirs, _ = local_multi_tensor_l2_norm(0, torch.zeros(1), gradients, False)
    torch.testing.assert_close(ours, theirs)
