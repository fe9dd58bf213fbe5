"""Every legal layout has a case, settings meet in pairs, and flags say what the case says."""

from itertools import combinations, product

import pytest

from megatron_switch.commands.layout_check.cases import (
    AXES,
    MEANINGS,
    NUM_EXPERTS,
    SETTINGS,
    Case,
    all_cases,
    legal_layouts,
    quick_cases,
)
from megatron_switch.layout.grid import Layout
from megatron_switch.testing.covering_array import pairs_of

FACTORS = {**MEANINGS, **SETTINGS}


@pytest.fixture(scope="module")
def cases():
    return all_cases(8)


def rows_of(cases):
    return [{**case.sizes(), **case.values} for case in cases]


def pairs_in(cases):
    return {pair for row in rows_of(cases) for pair in pairs_of(row)}


@pytest.mark.parametrize(("ranks", "number"), [(1, 1), (2, 11), (4, 56), (8, 192)])
def test_every_layout_that_forms_both_grids_comes_once(ranks, number):
    powers = [size for size in (1, 2, 4, 8) if size <= ranks]
    by_hand = {
        (tp, pp, vp, ep, etp, cp)
        for tp, pp, vp, ep, etp, cp in product(powers, powers, (1, 2), powers, powers, powers)
        if tp * pp * cp <= ranks and ep * etp * pp <= ranks and (vp == 1 or pp > 1)
    }
    layouts = legal_layouts(ranks)
    found = [(one.tp, one.pp, one.vp, one.ep, one.etp, one.cp) for one in layouts]
    assert len(found) == number
    assert set(found) == by_hand
    assert len(found) == len(by_hand)


def test_one_case_for_each_layout_fewest_ranks_first(cases):
    assert [case.layout for case in cases] == [
        layout for ranks in (1, 2, 4, 8) for layout in legal_layouts(ranks)
    ]


def test_any_two_settings_meet(cases):
    wanted = {
        frozenset(((one, x), (other, y)))
        for one, other in combinations(FACTORS, 2)
        for x, y in product(FACTORS[one], FACTORS[other])
    }
    assert wanted <= pairs_in(cases)


@pytest.mark.slow
def test_any_setting_meets_any_size_of_any_axis_where_it_can(cases):
    sizes = {axis: {case.sizes()[axis] for case in cases} for axis in AXES}
    missing = {
        (axis, size, factor, value)
        for axis, factor in product(AXES, FACTORS)
        for size, value in product(sizes[axis], FACTORS[factor])
        if frozenset(((axis, size), (factor, value))) not in pairs_in(cases)
    }
    # Eight replicas need eight micro-batches, and other layouts get by with fewer; there are two
    # layouts of eight stages.
    others = {one for one in missing if one[2] != "micro_batches"}
    assert {(axis, size) for axis, size, _, _ in others} == {("pp", 8)}
    assert ("dp", 8, "micro_batches", "2") in missing


def test_micro_batches_divide_over_replicas_and_interleaved_stages(cases):
    for case in cases:
        number = int(case.values["micro_batches"])
        assert number % case.layout.dp == 0, str(case)
        assert case.layout.vp == 1 or number // case.layout.dp % case.layout.pp == 0, str(case)


def test_the_quick_check_keeps_every_pair(cases):
    small = [case for case in cases if case.layout.world_size <= 4]
    quick = quick_cases(small)
    assert pairs_in(quick) == pairs_in(small)
    assert len(quick) < len(small) * 0.6
    assert quick == quick_cases(small)


def test_there_is_a_stage_without_experts_in_front_and_at_the_end(cases):
    patterns = {
        (case.layout.pp, case.layout.vp): flags[flags.index("--moe-layer-freq") + 1]
        for case in cases
        for flags in [case.flags("cpu")]
    }
    assert patterns[4, 1] == "[0,1,1,0]"
    assert patterns[4, 2] == patterns[8, 1] == "[0,1,1,0,0,1,1,0]"


def test_flags_say_the_layout_and_the_settings():
    values = {factor: list(choices)[-1] for factor, choices in FACTORS.items()}
    layout = Layout(8, tp=2, pp=2, vp=2, ep=4, etp=1, cp=2)
    text = " ".join(Case(layout, values, 4).flags("cuda"))
    for part in (
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--expert-model-parallel-size 4",
        "--expert-tensor-parallel-size 1",
        "--context-parallel-size 2",
        "--sequence-parallel",
        f"--num-experts {NUM_EXPERTS}",
        "--switch-device cuda",
        "--global-batch-size 16",
        "--switch-drop-order probability",
        "--calculate-per-token-loss",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--recompute-modules core_attn mlp",
        "--switch-dispatch padded",
    ):
        assert part in text


def test_one_rank_has_no_sequence_parallelism_and_no_chunks(cases):
    text = " ".join(cases[0].flags("cpu"))
    assert "--sequence-parallel" not in text
    assert "virtual" not in text


def test_a_reference_has_the_meaning_and_nothing_else(cases):
    for case in cases:
        reference = case.reference()
        assert reference.layout == Layout(1)
        assert reference.meaning == case.meaning
        assert reference.evaluates
        plain = {name: reference.values[name] for name in ("optimizer", "recompute", "dispatch")}
        assert plain == {"optimizer": "plain", "recompute": "none", "dispatch": "packed"}


def test_a_case_is_told_in_one_line(cases):
    assert str(cases[0]).startswith("1 ranks: TP 1 PP 1 VP 1 EP 1 ETP 1 CP 1 DP 1; ")
