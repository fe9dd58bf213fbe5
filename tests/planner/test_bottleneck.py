"""The time of a step is shared out whole, and reasons name what differs."""

from dataclasses import replace

import pytest
from support.plan_case import REQUEST, TRAINING, plan_of

from megatron_switch.planner.bottleneck import bottleneck, step_breakdown, why_faster
from megatron_switch.planner.memory_saving import MemorySaving


def test_seconds_by_cause_add_up_to_the_step():
    for sizes in ({"ep": 8}, {"tp": 2, "pp": 2, "ep": 16, "etp": 1}):
        plan = plan_of(**sizes)
        assert sum(step_breakdown(plan).values()) == pytest.approx(plan.timing.step)


def test_a_reason_names_what_differs():
    near, far = plan_of(ep=8), plan_of(ep=64)
    assert near.kept_tokens_per_second > far.kept_tokens_per_second
    reason = why_faster(near, far)
    gain = near.kept_tokens_per_second / far.kept_tokens_per_second - 1
    assert reason.startswith(f"{gain:.1%} more kept tokens a second: ")
    assert "less all-to-all" in reason


@pytest.mark.parametrize(
    ("saving", "word"),
    [
        (MemorySaving("distributed", False, "full"), "every layer computed twice"),
        (MemorySaving("distributed", False, "moe"), "the sparse layers computed twice"),
        (MemorySaving("fully_sharded", False, "none"), "weights and gradients cut"),
        (MemorySaving("distributed", True, "none"), "the optimizer on the host"),
    ],
)
def test_memory_binds_where_it_had_to_be_saved(saving, word):
    plan = plan_of(saving.applied_to(TRAINING), ep=8)
    text = bottleneck(plan, REQUEST.hardware)
    assert text.startswith("memory: it fits only with")
    assert word in text


def test_otherwise_the_largest_share_of_the_step_binds():
    assert bottleneck(plan_of(ep=8), REQUEST.hardware).startswith("arithmetic, ")
    deep = plan_of(replace(TRAINING, global_batch_size=64), pp=8, ep=16)
    assert bottleneck(deep, REQUEST.hardware).startswith("bubble, ")
