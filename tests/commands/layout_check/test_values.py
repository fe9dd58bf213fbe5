"""Ranks' parts add up to a verdict: what is off, missing, drifted or routed otherwise is named."""

import math
from dataclasses import replace

import pytest
import torch

from megatron_switch.commands.layout_check.values import (
    TOLERANCE,
    Routed,
    Values,
    WholeValues,
    report,
    verdict_of,
)
from megatron_switch.testing.global_start import Part

DENSE, EXPERTS = "decoder.linear.weight", "decoder.mlp.experts.weight"


def part(key, whole, rows):
    values = whole[rows].clone()
    offset = (rows.start, *(0 for _ in whole.shape[1:]))
    shape = (rows.stop - rows.start, *whole.shape[1:])
    return Part(key, offset, shape, tuple(whole.shape), values)


def routed(positions, *, experts, kept, margins=None, micro_batch=0):
    margins = [0.5] * len(positions) if margins is None else margins
    return Routed(
        step=1,
        layer=2,
        micro_batch=micro_batch,
        position_T=torch.tensor(positions),
        expert_T=torch.tensor(experts),
        kept_T=torch.tensor(kept),
        margin_T=torch.tensor(margins),
    )


DENSE_WHOLE = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
EXPERTS_WHOLE = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(2))
EXPERTS_WHOLE[1] *= 1e-3


def one_rank():
    values = Values({"loss of step 1": 2.0, "loss of evaluation": 3.0})
    values.tensors.append(("gradient 1", part(DENSE, DENSE_WHOLE, slice(0, 4))))
    for expert in range(2):
        one = part(EXPERTS, EXPERTS_WHOLE, slice(expert, expert + 1))
        values.tensors.append(("gradient 1", one))
    values.routed.append(
        routed([0, 1, 2, 3], experts=[0, 1, 1, 0], kept=[1, 1, 0, 1], margins=[1, 1, 1, 1e-6])
    )
    return WholeValues.of(values)


def two_ranks():
    """Dense rows and tokens in halves, one expert each; the loss is on the second rank."""
    first, second = Values(), Values({"loss of step 1": 2.0, "loss of evaluation": 3.0})
    for rank, values in enumerate((first, second)):
        rows = slice(2 * rank, 2 * rank + 2)
        values.tensors.append(("gradient 1", part(DENSE, DENSE_WHOLE, rows)))
        own = slice(rank, rank + 1)
        values.tensors.append(("gradient 1", part(EXPERTS, EXPERTS_WHOLE, own)))
    first.routed.append(routed([0, 1], experts=[0, 1], kept=[1, 1]))
    second.routed.append(routed([2, 3], experts=[1, 0], kept=[0, 1]))
    return first, second


def judge(*ranks, reference=None):
    reference = one_rank() if reference is None else reference
    return verdict_of([report(values, reference) for values in ranks], reference)


def test_equal_parts_are_equal():
    verdict = judge(*two_ranks())
    assert verdict.equal
    assert set(verdict.deviation.values()) == {0.0}
    assert (verdict.wrong, verdict.unlike, verdict.near_ties) == ({}, [], [])


def test_every_expert_is_a_tensor_of_its_own():
    first, second = two_ranks()
    second.tensors[1][1].values.mul_(1.01)
    wrong = judge(first, second).wrong
    assert wrong == {f"gradient 1 of {EXPERTS}[1]": pytest.approx(0.01, rel=1e-4)}


def test_deviations_of_parts_add_up_by_norm():
    first, second = two_ranks()
    for values in (first, second):
        values.tensors[0][1].values.mul_(1.0 + 0.9e-4)
    verdict = judge(first, second)
    assert verdict.deviation[f"gradient 1 of {DENSE}"] == pytest.approx(0.9e-4, rel=1e-2)
    assert not verdict.equal


def test_what_is_within_tolerance_is_equal():
    first, second = two_ranks()
    first.tensors[0][1].values.mul_(1.0 + TOLERANCE / 2)
    second.scalars["loss of step 1"] *= 1.0 + TOLERANCE / 2
    assert judge(first, second).equal


def test_a_replica_that_has_drifted_shows_whichever_comes_first():
    first, second = two_ranks()
    drifted = Values(tensors=[("gradient 1", part(DENSE, DENSE_WHOLE, slice(0, 2)))])
    drifted.tensors[0][1].values.neg_()
    for ranks in ((first, second, drifted), (drifted, first, second)):
        assert list(judge(*ranks).wrong) == [f"gradient 1 of {DENSE}"]


def test_ranks_that_know_another_scalar_show():
    first, second = two_ranks()
    first.scalars["loss of step 1"] = 2.1
    assert judge(first, second).wrong == {"loss of step 1": pytest.approx(0.05)}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_wrong_on_any_rank(bad):
    first, second = two_ranks()
    first.tensors[0][1].values[0, 0] = bad
    second.scalars["loss of step 1"] = bad
    assert judge(first, second).wrong.keys() == {f"gradient 1 of {DENSE}", "loss of step 1"}


def test_what_no_rank_holds_is_missed():
    first, second = two_ranks()
    second.tensors.pop(0)
    del second.scalars["loss of step 1"]
    assert judge(first, second).wrong == {
        f"gradient 1 of {DENSE}": math.inf,
        "loss of step 1": math.inf,
    }


def test_a_zero_where_there_was_none_is_wrong_and_zeros_are_equal():
    reference = one_rank()
    name = f"gradient 1 of {EXPERTS}[0]"
    reference.tensors[name].zero_()
    first, second = two_ranks()
    assert judge(first, second, reference=reference).wrong == {name: math.inf}
    first.tensors[1][1].values.zero_()
    assert judge(first, second, reference=reference).equal


def test_a_token_that_went_elsewhere_is_told():
    first, second = two_ranks()
    first.routed[0] = routed([0, 1], experts=[0, 3], kept=[1, 0])
    verdict = judge(first, second)
    assert not verdict.equal
    assert verdict.unlike == [
        "step 1, layer 2, micro-batch 0, token 1: expert 3 (dropped), not 1 (margin 1.0e+00)"
    ]


def test_a_near_tie_is_listed_and_forgiven():
    first, second = two_ranks()
    second.routed[0] = routed([2, 3], experts=[1, 1], kept=[0, 1])
    verdict = judge(first, second)
    assert verdict.equal
    assert verdict.near_ties == [
        "step 1, layer 2, micro-batch 0, token 3: expert 1, not 0 (margin 1.0e-06)"
    ]


def test_tokens_that_nobody_routed_are_missed():
    first, second = two_ranks()
    second.routed.clear()
    assert judge(first, second).unlike == ["2 tokens were routed, not 4"]


def test_values_that_were_not_asked_for_can_be_left_out():
    first, second = two_ranks()
    del second.scalars["loss of evaluation"]
    assert not judge(first, second).equal
    assert judge(first, second, reference=one_rank().without("of evaluation")).equal


def test_the_worst_of_some_values():
    verdict = replace(judge(*two_ranks()), deviation={"aux of a": 1.0, "aux of b": 2.0, "z": 9.0})
    assert verdict.worst("aux of ") == 2.0
    assert math.isnan(verdict.worst("clip"))
