"""Each grid is filtered by itself, and the result is what all rules together accept."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from megatron_switch.layout.model_rules import LayoutConstraints, broken_rules
from megatron_switch.layout.sizes import Sizes, divisors
from megatron_switch.planner.legal_sizes import CHOSEN_SIZES, legal_sizes

GIVEN = LayoutConstraints(
    num_experts=8,
    num_layers=4,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=2048,
    moe_ffn_hidden_size=2048,
    padded_vocab_size=1024,
    seq_length=256,
    sequence_parallel=True,
    micro_batch_size=1,
    global_batch_size=24,
)


def values(sizes):
    return [tuple(getattr(one, name) for name in CHOSEN_SIZES) for one in sizes]


@pytest.mark.parametrize("ranks", [4, 6, 8])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"capacity_group": "ep"},
        {"add_bias_linear": True},
        {"one_stage": True, "whole_sequences": True},
        {"num_attention_heads": 6, "num_query_groups": None},
        {"global_batch_size": 8, "micro_batch_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("vp", [1, 2])
def test_choices_are_those_that_break_no_rule(ranks, changes, vp):
    given = replace(GIVEN, **changes)
    everything = [
        Sizes(ranks, **dict(zip(CHOSEN_SIZES, chosen, strict=True)), vp=vp)
        for chosen in product(divisors(ranks), repeat=5)
    ]
    legal = [sizes for sizes in everything if not broken_rules(sizes, given)]
    assert legal or changes  # what is plain has legal sizes
    excluded = Counter()
    assert legal_sizes(ranks, given, fixed={"vp": vp}, excluded=excluded) == legal
    assert excluded.total() + len(legal) == len(everything)


def test_excluded_choices_are_counted_by_the_rule_without_its_values():
    excluded = Counter()
    legal_sizes(8, replace(GIVEN, num_attention_heads=1, num_query_groups=None), excluded=excluded)
    # TP 2, 4 and 8 with TP x CP x PP <= 8, each with 16 choices of EP and ETP.
    assert excluded["Attention heads must be a multiple of TP"] == (6 + 3 + 1) * 16


def test_without_experts_expert_tensor_parallelism_follows_tensor_parallelism():
    dense = replace(GIVEN, num_experts=None)
    found = legal_sizes(4, dense)
    assert all(sizes.etp == sizes.tp and sizes.ep == 1 for sizes in found)
    assert len(values(found)) == len(set(values(found)))


def test_fixed_sizes_are_kept_whether_or_not_they_divide_the_ranks():
    found = legal_sizes(8, GIVEN, fixed={"tp": 2, "ep": 4})
    assert found
    assert {(sizes.tp, sizes.ep) for sizes in found} == {(2, 4)}
    assert legal_sizes(8, GIVEN, fixed={"tp": 3}) == []
    assert legal_sizes(8, GIVEN, fixed={"ep": 0}) == []
