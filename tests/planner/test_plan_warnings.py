"""Warnings name numbers and flags."""

from dataclasses import replace

from support.plan_case import REQUEST, TRAINING, plan_of

from megatron_switch.layout.grid import Layout
from megatron_switch.planner.plan_warnings import plan_warnings, worst_leaves


def words(plan, request=REQUEST):
    return "\n".join(plan_warnings(plan, request))


def test_a_quiet_layout_has_no_warning():
    training = replace(TRAINING, micro_batch_size=4)
    assert plan_warnings(plan_of(training, ep=8), REQUEST) == []


def test_drops_are_warned_of_from_one_per_cent():
    plan = plan_of(replace(TRAINING, micro_batch_size=1), ep=8)
    assert plan.dropped > 0.01
    assert f"drops {plan.dropped:.1%} of the tokens" in words(plan)
    assert "--moe-expert-capacity-factor" in words(plan)


def test_an_expert_group_that_leaves_its_node_is_warned_of():
    assert "leaves its node: it is on 8 nodes under one leaf switch" in words(plan_of(ep=64))
    few = replace(REQUEST, hardware=replace(REQUEST.hardware, nodes_per_leaf=3))
    assert worst_leaves(Layout(128, ep=64), few.hardware) == 4  # nodes 8 to 15 touch four leaves
    assert "under up to 4 leaf switches (--topology)" in words(plan_of(ep=64), few)


def test_a_large_share_of_all_to_all_is_warned_of():
    slow = replace(
        REQUEST, hardware=replace(REQUEST.hardware, network=replace(
            REQUEST.hardware.network, alltoall_gb_s=2.0
        ))
    )  # fmt: skip
    plan = plan_of(request=slow, ep=64)
    assert plan.timing.all_to_all_share > 0.25
    assert f"All-to-all takes {plan.timing.all_to_all_share:.0%} of the step" in words(plan, slow)


def test_tensor_parallelism_beyond_eight_is_warned_of():
    assert "--tensor-model-parallel-size 16 is above 8" in words(plan_of(tp=16, etp=1, ep=8))


def test_full_memory_is_warned_of():
    plan = plan_of(ep=8)
    tight = replace(REQUEST.hardware, memory_gb=plan.memory.total / 1e9 / 0.91, reserved_gb=0.0)
    assert "Memory is 91% full" in words(plan, replace(REQUEST, hardware=tight))
