"""An explanation adds up."""

from support.plan_case import REQUEST, plan_of

from megatron_switch.planner.explanation import explain


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
