"""Megatron's refusals keep their words, and process groups end when, and only when, they can."""

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_switch.errors import ConfigError
from megatron_switch.layout.grid import Layout
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.loop import global_state
from megatron_switch.training.loop.global_state import process_groups, training_seconds, validate


@pytest.fixture(autouse=True)
def _environment_stays(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def validated(line):
    fill_defaults(line, "cpu")
    validate(line.args)
    return line.args


def test_a_missing_checkpoint_is_never_passed_over(sparse_line):
    args = validated(sparse_line())
    assert args.exit_on_missing_checkpoint
    assert args.ffn_hidden_size == 128


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # An assertion with words, one without, and an error.
        ("--train-samples 10", r"Megatron refuses these flags: expected iteration-based training"),
        (
            "--min-lr 1",
            r"Megatron refuses these flags: args\.min_lr <= args\.lr must hold\. "
            r"The values are --lr 0\.001, --min-lr 1\.0\. Change one of them\.",
        ),
    ],
)
def test_a_refusal_has_megatrons_words_or_its_rule(sparse_line, flags, message):
    with pytest.raises(ConfigError, match=message):
        validated(sparse_line(flags))


@pytest.mark.parametrize(
    ("flags", "queues"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel", "1"),
        # Megatron-FSDP refuses one queue; so a default of one would stop every such launch.
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --use-megatron-fsdp --ckpt-format "
            "fsdp_dtensor --data-parallel-sharding-strategy optim_grads_params",
            None,
        ),
        ("", None),
    ],
)
def test_queues_of_kernels_are_set_where_megatron_asks_for_one(
    sparse_line, monkeypatch, flags, queues
):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    monkeypatch.setattr("megatron.training.arguments.get_device_arch_version", lambda: 9)
    line = sparse_line(flags)
    line.args.world_size = 2
    sharded, line.args.use_megatron_fsdp = line.args.use_megatron_fsdp, False
    fill_defaults(line, "cpu")
    line.args.use_megatron_fsdp = sharded  # as on GPUs, where defaults do not refuse it
    validate(line.args)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == queues


@pytest.fixture
def groups(monkeypatch):
    """Replace the making and the end of groups by entries in a list."""
    calls = []
    monkeypatch.setattr(global_state, "_build_process_groups", lambda *_: calls.append("built"))
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda: calls.append("destroyed")
    )
    return calls


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (None, ["built", "destroyed"]),
        (SystemExit(0), ["built", "destroyed"]),
        (RuntimeError("a peer is gone"), ["built"]),
    ],
)
def test_groups_end_in_order_but_are_not_waited_for_after_an_error(groups, error, calls):
    def use():
        with process_groups(SimpleNamespace(), Layout(1)):
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(type(error)):
            use()
    assert groups == calls


def test_training_time_is_megatrons_interval_timer_up_to_now(monkeypatch):
    calls = []
    timer = SimpleNamespace(
        elapsed=lambda reset: calls.append(reset), active_time=lambda: 2.5 * len(calls)
    )
    monkeypatch.setattr(global_state, "get_timers", lambda: {"interval-time": timer}.__getitem__)
    assert training_seconds() == 2.5
    assert calls == [False]  # the console's own reading goes on from where it was
