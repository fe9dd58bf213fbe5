"""A launch of 1,024 ranks is rehearsed on one core, with the numbers that arithmetic gives."""

import pytest
from support.observed_run import rehearsed

from megatron_switch.architecture.model_flags import model_from_flags, read_model
from megatron_switch.architecture.parameters import stage_parameters
from megatron_switch.commands.rehearse import launch_argv
from megatron_switch.layout.grid import Layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "gpt-1.6t-128"
LAYOUT = Layout(1024, tp=4, pp=4, ep=128, etp=1)
FLAGS = (
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 4 "
    "--global-batch-size 256 --overlap-grad-reduce --overlap-param-gather"
)


def test_a_trillion_parameters_over_a_thousand_ranks():
    flags = " ".join([*launch_argv(MODEL, 1024), FLAGS])
    (report,) = rehearsed(flags, world_size=1024, ranks=[517])
    stage = LAYOUT.coordinates(517).pp
    assert stage == 2
    count = stage_parameters(model_from_flags(read_model(MODEL)), LAYOUT, stage)
    assert report.parameters == {"dense": count.dense, "expert": count.expert}
    state = report.state_bytes
    assert state["expert weights"] == 2 * count.expert
    assert state["expert gradients"] == 4 * count.expert
    assert state["expert optimizer"] == pytest.approx(12 * count.expert / LAYOUT.edp, rel=1e-3)
    # A bucket is padded so that every rank has an equal, aligned part of it.
    assert state["dense gradients"] == pytest.approx(4 * count.dense, rel=1e-3)
    assert state["dense optimizer"] == pytest.approx(12 * count.dense / LAYOUT.dp, rel=1e-2)
    assert report.groups["ep"] == LAYOUT.group("ep", 517)

    (exchange,) = [row for row in report.collectives if row.kind == "all-to-all"]
    slots = 20  # of 2048 tokens with factor 1.25, for each of 128 experts
    rows = 128 * slots // LAYOUT.tp
    layers, micro_batches, both_ways_both_passes = 6, 4, 4
    calls = layers * micro_batches * both_ways_both_passes
    tokens = calls * rows * 8192 * 2
    gates = calls // 2 * rows * 4  # beside the tokens, to the experts only
    assert exchange.num_members == 128
    assert exchange.num_nodes == 16
    assert exchange.count == calls + calls // 2
    assert exchange.num_bytes == tokens + gates
