"""Runs that are taken step by step follow one another in a process, and leave it as it was."""

import os

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from support.tiny_run import SPARSE

from megatron_switch import parallel_state
from megatron_switch.commands.layout_check.training_run import _micro_batches
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.training.arguments.parser import parse_command_line
from megatron_switch.training.loop.stepped_run import StepHooks, stepped_run
from megatron_switch.upstream.repairs import repaired_megatron

FLAGS = f"{SPARSE} --mock-data --hidden-dropout 0 --attention-dropout 0 --rerun-mode disabled"
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def batches(seed):
    return lambda rank, size: _micro_batches(seed, rank, size)


def losses(flags, *, evaluate_after=None, hooks=None, steps=3):
    """Run steps; return their losses and gradient norms."""
    line = parse_command_line(f"{FLAGS} {flags}".split())
    outcomes = []
    with stepped_run(line, "cpu", batches(0), hooks or StepHooks()) as run:
        for step in range(steps):
            outcomes.append(run.step())
            if step == evaluate_after:
                assert run.evaluate(batches(1000)).routing.tokens_L.sum() > 0
        run.sync_parameters()
    return [(outcome.loss, outcome.grad_norm) for outcome in outcomes]


def in_emulation(check):
    with cuda_on_cpu(), repaired_megatron():
        check()


@pytest.mark.slow
def test_runs_follow_one_another_and_leave_nothing_behind():
    run_ranks(lambda rank: in_emulation(_check_two_runs), 2)


def _check_two_runs():
    environment, world = dict(os.environ), dist.group.WORLD
    first = losses("--expert-model-parallel-size 2")
    assert dict(os.environ) == environment
    assert not mpu.model_parallel_is_initialized()
    assert not parallel_state.is_initialized()
    assert list(dist.distributed_c10d._world.pg_map) == [world]
    losses("--pipeline-model-parallel-size 2", steps=1)
    assert losses("--expert-model-parallel-size 2") == first


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", DISTRIBUTED])
def test_an_evaluation_in_between_changes_nothing(more):
    run_ranks(lambda rank: in_emulation(lambda: _check_evaluation(more)), 2)


def _check_evaluation(more):
    undisturbed = losses(f"--eval-iters 1 {more}")
    assert losses(f"--eval-iters 1 {more}", evaluate_after=0) == undisturbed
    assert undisturbed[2] != undisturbed[1]


@pytest.mark.slow
def test_an_observer_sees_layers_chunks_and_complete_gradients():
    run_ranks(lambda rank: in_emulation(_check_hooks), 1)


def _check_hooks():
    seen = []

    def layers(block):
        seen.append(("layers", len(block.layer_specs)))
        return block

    def zero(chunks):
        seen.append(("start", len(chunks)))
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.zero_()

    hooks = StepHooks(
        arguments=lambda args: seen.append(("arguments", args.num_experts)),
        layers=layers,
        start=zero,
        gradients=lambda: seen.append(("gradients", 0)),
    )
    ((loss, _),) = losses("", hooks=hooks, steps=1)
    assert seen == [("arguments", 4), ("layers", 4), ("start", 1), ("gradients", 0)]
    # All logits of a model of zeros are equal: every row of the padded vocabulary is as likely.
    assert loss == pytest.approx(float(torch.tensor(1024.0).log()), rel=1e-5)
