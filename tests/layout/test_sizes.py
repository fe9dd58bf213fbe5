"""Sizes as they were given: what follows from what."""

import pytest

from megatron_switch.flags.values import FlagValues
from megatron_switch.layout.sizes import TP_PP_DP_ORDER, Sizes, divisors, given_sizes


def test_expert_tensor_parallelism_follows_tensor_parallelism_unless_given():
    assert Sizes(16, tp=2).changed(tp=4).etp == 4
    assert Sizes(16, tp=2, etp=2).changed(tp=4).etp == 2


def test_flags_set_sizes_and_the_order_of_ranks():
    flags = FlagValues(
        {"tensor-model-parallel-size": "2", "expert-model-parallel-size": 4, "num-layers": "8"}
    )
    assert given_sizes(flags) == {"tp": 2, "ep": 4}
    assert Sizes.of_flags(16, flags) == Sizes(16, tp=2, ep=4)
    assert Sizes.of_flags(16, flags).etp_follows_tp
    mapped = FlagValues({**flags.values, "use-tp-pp-dp-mapping": True})
    assert Sizes.of_flags(16, mapped).order == TP_PP_DP_ORDER


@pytest.mark.parametrize(("number", "expected"), [(1, [1]), (7, [1, 7]), (12, [1, 2, 3, 4, 6, 12])])
def test_divisors_are_ascending(number, expected):
    assert divisors(number) == expected
