"""The emulation is explicit: its patches are counted, verified, all applied and all undone."""

import dataclasses
import importlib
import inspect
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch

from megatron_switch.emulation import cuda_on_cpu, patches
from megatron_switch.emulation.device import EmulatedDevice
from megatron_switch.emulation.function_mode import CudaOnCpu, RandomStreams
from megatron_switch.errors import UpstreamError
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.upstream.patching import applied

ROOT = Path(__file__).parents[2]
OURS = (str(ROOT / "tests"), str(ROOT / "tools"))
"""Folders whose modules may import the emulation's own names."""
NUM_PATCHES = {"torch": 47, "megatron": 2}
"""A new patch needs a reason; so does this number."""

MODULES = ("torch.cuda", "torch.cuda.random", "torch.cuda.nvtx", "torch.random", "torch.autograd")


def make_patches():
    streams = RandomStreams()
    return patches.emulation_patches(EmulatedDevice(), streams, CudaOnCpu(streams))


def current(target):
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    return inspect.getattr_static(owner, name)


def contents(name):
    return dict(vars(importlib.import_module(name)))


def test_number_of_patches():
    packages = [patch.target.partition(".")[0].partition(":")[0] for patch in make_patches()]
    assert {name: packages.count(name) for name in packages} == NUM_PATCHES


def test_compiling_at_import_leaves_functions_as_they_are():
    (patch,) = patches.import_patches()
    with applied([patch]):
        assert torch.compile(abs) is abs
        assert torch.compile(mode="max-autotune")(abs) is abs
    assert torch.compile is not patch.replacement


def test_every_patch_is_applied_and_undone():
    targets = [patch.target for patch in make_patches()]
    originals = {target: current(target) for target in targets}
    with cuda_on_cpu():
        for target in targets:
            assert current(target) is not originals[target], target
    for target in targets:
        assert current(target) is originals[target], target


def test_modules_are_the_same_objects_afterwards():
    make_patches()
    with cuda_on_cpu():
        pass  # imports what it patches
    before = {name: contents(name) for name in MODULES}
    with cuda_on_cpu():
        torch.zeros(1, device="cuda").cuda()
    for name in MODULES:
        after = contents(name)
        assert after.keys() == before[name].keys()
        changed = [key for key in after if after[key] is not before[name][key]]
        assert changed == [], name


def test_everything_is_undone_after_an_exception():
    is_available, environment = torch.cuda.is_available, dict(os.environ)
    filters = list(warnings.filters)
    with pytest.raises(KeyError), cuda_on_cpu():
        raise KeyError
    assert torch.cuda.is_available is is_available
    assert dict(os.environ) == environment
    assert warnings.filters == filters
    assert torch.overrides._get_current_function_mode_stack() == []
    with cuda_on_cpu():  # and it can be entered again
        pass


def test_no_module_keeps_anything_of_the_emulation():
    with cuda_on_cpu():
        torch.zeros(1, device="cuda")
    kept = [
        f"{module_name}:{name}"
        for module_name, module in list(sys.modules.items())
        if not module_name.startswith("megatron_switch")
        and not (getattr(module, "__file__", None) or "").startswith(OURS)
        for name, value in list(vars(module).items())
        if str(getattr(value, "__module__", "")).startswith("megatron_switch.emulation")
    ]
    assert kept == []


def test_entering_twice_is_a_mistake():
    with cuda_on_cpu(), pytest.raises(AssertionError, match="already entered"), cuda_on_cpu():
        pass


def checked_patches():
    return [patch for patch in make_patches() if patch.sha256]


def test_what_is_checked_by_source():
    assert {patch.target for patch in checked_patches()} == {
        "megatron.training.training:initialize_megatron",
        "megatron.training.training:set_jit_fusion_options",
    }


@pytest.mark.parametrize("index", range(2))
def test_a_changed_source_stops_before_anything_is_replaced(index):
    changed = dataclasses.replace(checked_patches()[index], sha256=("0" * 64,))
    all_patches = [changed if patch.target == changed.target else patch for patch in make_patches()]
    before = contents("torch.cuda")
    message = rf"{changed.target} in megatron-core 0\.19\.2 is not the code .* expected 0{{64}}"
    with pytest.raises(UpstreamError, match=message), applied(all_patches):
        pytest.fail("the block was entered")
    assert contents("torch.cuda") == before


def test_megatron_is_told_one_connection_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    with cuda_on_cpu():
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with cuda_on_cpu():
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_nothing_is_compiled_inside():
    # In a process of its own: after Dynamo has traced, autograd starts threads, and no fork can.
    run_ranks(_check_nothing_is_compiled, 1)


def _check_nothing_is_compiled(rank):
    function = torch.compile(lambda x: x + 1, backend=_refuse_to_compile)
    with cuda_on_cpu():
        assert function(torch.ones(1)).item() == 2
    with pytest.raises(Exception, match="asked to compile"):
        function(torch.ones(1))


def _refuse_to_compile(graph, inputs):
    raise RuntimeError("asked to compile")
