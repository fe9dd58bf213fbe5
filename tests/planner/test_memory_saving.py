"""Ways to save memory cost time, and what each needs."""

from support.plan_case import TRAINING, plan_of

from megatron_switch.planner.memory_saving import MemorySaving


def test_savings_cost_time():
    base = plan_of(ep=8).timing.step
    for saving in (
        MemorySaving("distributed", False, "moe"),
        MemorySaving("distributed", True, "none"),
    ):
        assert plan_of(saving.applied_to(TRAINING), ep=8).timing.step > base
    moe = plan_of(MemorySaving("distributed", False, "moe").applied_to(TRAINING), ep=8)
    full = plan_of(MemorySaving("distributed", False, "full").applied_to(TRAINING), ep=8)
    assert full.timing.step > moe.timing.step
    assert full.memory.activations < moe.memory.activations < plan_of(ep=8).memory.activations
