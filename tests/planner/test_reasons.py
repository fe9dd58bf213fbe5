"""Words about plans: warnings name numbers and flags, reasons name what differs."""

from dataclasses import replace

import pytest

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training
from megatron_switch.planner.explain import explain
from megatron_switch.planner.hardware.cluster import load_hardware
from megatron_switch.planner.reasons import (
    binding_constraint,
    layout_name,
    seconds_by_cause,
    warnings_of,
    why_better,
    worst_leaves,
)
from megatron_switch.planner.search import Request, with_saving, work_out

MODEL = Architecture(
    decoder=Stack(8, (1, 3, 5, 7)),
    hidden_size=1024,
    num_attention_heads=16,
    ffn_hidden_size=4096,
    padded_vocab_size=32768,
    num_experts=64,
)
TRAINING = Training(seq_length=1024, global_batch_size=8192, micro_batch_size=2)
REQUEST = Request(model=MODEL, training=TRAINING, hardware=load_hardware("a100-80gb-hdr"), nodes=16)


def plan_of(training=TRAINING, request=REQUEST, **sizes):
    return work_out(request, Layout(128, **sizes), training)


def words(plan, request=REQUEST):
    return "\n".join(warnings_of(plan, request))


def test_a_quiet_layout_has_no_warning():
    training = replace(TRAINING, micro_batch_size=4)
    assert warnings_of(plan_of(training, ep=8), REQUEST) == []


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


def test_seconds_by_cause_add_up_to_the_step():
    for sizes in ({"ep": 8}, {"tp": 2, "pp": 2, "ep": 16, "etp": 1}):
        plan = plan_of(**sizes)
        assert sum(seconds_by_cause(plan).values()) == pytest.approx(plan.timing.step)


def test_a_reason_names_what_differs():
    near, far = plan_of(ep=8), plan_of(ep=64)
    assert near.kept_tokens_per_second > far.kept_tokens_per_second
    reason = why_better(near, far)
    gain = near.kept_tokens_per_second / far.kept_tokens_per_second - 1
    assert reason.startswith(f"{gain:.1%} more kept tokens a second: ")
    assert "less all-to-all" in reason


@pytest.mark.parametrize(
    ("saving", "word"),
    [
        (("distributed", False, "full"), "every layer computed twice"),
        (("distributed", False, "moe"), "the sparse layers computed twice"),
        (("fully_sharded", False, "none"), "weights and gradients cut"),
        (("distributed", True, "none"), "the optimizer on the host"),
    ],
)
def test_memory_binds_where_it_had_to_be_saved(saving, word):
    plan = plan_of(with_saving(TRAINING, saving), ep=8)
    text = binding_constraint(plan, REQUEST.hardware)
    assert text.startswith("memory: it fits only with")
    assert word in text


def test_otherwise_the_largest_share_of_the_step_binds():
    assert binding_constraint(plan_of(ep=8), REQUEST.hardware).startswith("arithmetic, ")
    deep = plan_of(replace(TRAINING, global_batch_size=64), pp=8, ep=16)
    assert binding_constraint(deep, REQUEST.hardware).startswith("bubble, ")


def test_savings_cost_time():
    base = plan_of(ep=8).timing.step
    for saving in (("distributed", False, "moe"), ("distributed", True, "none")):
        assert plan_of(with_saving(TRAINING, saving), ep=8).timing.step > base
    moe = plan_of(with_saving(TRAINING, ("distributed", False, "moe")), ep=8)
    full = plan_of(with_saving(TRAINING, ("distributed", False, "full")), ep=8)
    assert full.timing.step > moe.timing.step
    assert full.memory.activations < moe.memory.activations < plan_of(ep=8).memory.activations


def test_an_explanation_has_every_part_and_its_total():
    plan = plan_of(tp=2, pp=2, ep=16, etp=1)
    sections = {section.title: section for section in explain(plan, REQUEST)}
    assert list(sections)[:3] == ["Parameters", "Ranks", "Capacity"]
    memory = sections[f"Memory of a rank of stage {plan.stage + 1}"]
    by_name = {line.name: line.result for line in memory.lines}
    assert by_name["at the peak"] == f"{plan.memory.total / 1e9:.2f} GB"
    assert set(plan.memory.parts()) <= set(by_name)
    step = sections["A step"].lines[-1]
    assert step.result == f"{plan.timing.step:.3f} s"
    capacity = {line.name: line.result for line in sections["Capacity"].lines}
    assert capacity["slots of an expert, C"] == "40"  # floor(2048 x 1.25 / 64)


def test_names_leave_out_what_is_not_cut():
    assert layout_name(Layout(8, ep=8)) == "TP1 PP1 EP8 ETP1"
    assert layout_name(Layout(8, pp=2, cp=2, vp=3, ep=2)) == "TP1 PP2 VP3 CP2 EP2 ETP1"
