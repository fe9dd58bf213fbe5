"""A launch's hooks change nothing; what they check is checked elsewhere."""

from argparse import Namespace

import pytest

from megatron_switch.config import SwitchConfig
from megatron_switch.training.loop import hooks
from megatron_switch.training.loop.hooks import RunHooks


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_launch_resolves_dispatch_for_its_own_device(device):
    assert RunHooks().dispatch_device(device) == device


def test_a_launch_keeps_its_arguments_and_its_data():
    args = Namespace(save="here", use_megatron_fsdp=True)
    before = vars(args).copy()
    launch = RunHooks()
    with launch.session(), launch.training(args, ["a note"]):
        launch.arguments_parsed(args)
        launch.settings_resolved(args, SwitchConfig())
        launch.arguments_validated(args)
    assert vars(args) == before
    assert launch.datasets_provider(args, print) is print


def test_a_launch_checks_its_checkpoint_and_its_memory(monkeypatch):
    called = {}
    monkeypatch.setattr(hooks, "find_finished", lambda args: called.setdefault("finished", args))
    monkeypatch.setattr(
        hooks, "check_model_memory", lambda args, layout, **more: called.update(memory=more)
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    args = Namespace()
    assert RunHooks().find_finished(args) is args
    RunHooks().check_memory(args, None, "cpu")
    assert called == {"finished": args, "memory": {"device": "cpu", "ranks_here": 3}}
