"""A dry run overrides hooks of a run, and changes exactly the flags that it cannot rehearse."""

from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.rehearsal.dry_run import DryRun, ObservedRun
from megatron_switch.training.loop.hooks import RunHooks

OF_A_LAUNCH = {
    "use_megatron_fsdp": True,
    "optimizer_cpu_offload": True,
    "use_precision_aware_optimizer": False,
    "fine_grained_activation_offloading": False,
}
"""Flags that Megatron would refuse for a run on the CPU."""


def arguments(**changes):
    plain = {
        **OF_A_LAUNCH,
        "fp8": None,
        "fp4": None,
        "use_torch_fsdp2": False,
        "cpu_offloading_num_layers": 0,
        "context_parallel_size": 1,
        "num_experts": 4,
        "switch_dispatch": "auto",
        "moe_expert_capacity_factor": 1.25,
        "save": "checkpoints",
        "switch_run_dir": "run",
    }
    return Namespace(**plain | changes)


@pytest.mark.parametrize("kind", [ObservedRun, DryRun])
def test_every_public_method_is_a_hook(kind):
    hooks = {name for name in vars(RunHooks) if not name.startswith("_")}
    public = {name for name in vars(kind) if not name.startswith("_")}
    assert public - hooks <= {"tensors"}


def test_a_dry_run_writes_nothing_and_meets_nobody():
    args = arguments()
    DryRun(print).arguments_parsed(args)
    assert (args.save, args.switch_run_dir, args.fake_process_group) == (None, None, True)


def test_flags_of_a_launch_on_gpus_are_restored_after_megatrons_checks():
    args, run = arguments(), DryRun(print)
    run.arguments_parsed(args)
    assert not any(getattr(args, name) for name in OF_A_LAUNCH)
    run.settings_resolved(args, SwitchConfig(dispatch="padded"))
    run.arguments_validated(args)
    assert {name: getattr(args, name) for name in OF_A_LAUNCH} == OF_A_LAUNCH


def test_routing_whose_shapes_depend_on_values_is_refused():
    packed, run = SwitchConfig(dispatch="packed"), DryRun(print)
    run.arguments_parsed(arguments())
    with pytest.raises(ConfigError, match=r"number of tokens sent.*--switch-dispatch padded"):
        run.settings_resolved(arguments(), packed)
    run.settings_resolved(arguments(num_experts=None), packed)
    run.settings_resolved(arguments(), replace(packed, dispatch="padded"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fp8": "hybrid"}, "--fp8-format cannot be rehearsed"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 cannot be rehearsed"),
        ({"context_parallel_size": 2}, "got --context-parallel-size 2"),
    ],
)
def test_flags_that_need_a_gpu_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        DryRun(print).arguments_parsed(arguments(**changes))


def test_a_dry_run_is_never_finished_and_needs_no_memory():
    run = DryRun(print)
    assert run.find_finished(arguments()) is None
    assert run.check_memory(arguments(), None, "cpu") is None
    assert run.dispatch_device("cpu") == "cuda"
    with run.tensors():
        assert torch.zeros(1 << 40).shape == (1 << 40,)
