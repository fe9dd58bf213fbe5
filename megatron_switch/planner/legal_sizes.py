"""Every legal choice of parallel sizes for a model on a number of GPUs, and what excludes others.

The rules are those of :mod:`megatron_switch.layout.grid_rules` and
:mod:`megatron_switch.layout.model_rules`, asked one grid at a time: the dense and the expert grid
share PP only, so that for each PP the two are filtered apart, and only pairs of what is left are
looked at together. 16,384 GPUs take a fraction of a second.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from operator import attrgetter

from megatron_switch.layout.grid_rules import (
    DENSE_GRID_RULES,
    EXPERT_GRID_RULES,
    JOINT_GRID_RULES,
    GridRule,
)
from megatron_switch.layout.model_rules import (
    DENSE_RULES,
    EXPERT_RULES,
    JOINT_RULES,
    LayoutConstraints,
    ModelRule,
)
from megatron_switch.layout.sizes import Sizes, divisors

CHOSEN_SIZES = ("tp", "pp", "cp", "ep", "etp")
"""Sizes that are chosen here. VP is not: it costs no GPUs, and :mod:`~.search` tries all."""


def legal_sizes(
    world_size: int,
    given: LayoutConstraints,
    *,
    fixed: Mapping[str, int] | None = None,
    excluded: Counter[str] | None = None,
) -> list[Sizes]:
    """Return all legal choices, TP varying slowest, then PP, CP, EP and ETP.

    Args:
        world_size: GPUs.
        given: What sizes have to divide.
        fixed: Sizes that are chosen already, by name; VP is 1 unless it is among them.
        excluded: Is given, by rule, the number of choices of divisors of ``world_size`` that break
            it; of several rules the first one counts.
    """
    fixed, counter = fixed or {}, Counter[str]() if excluded is None else excluded
    options: dict[str, Sequence[int]] = dict.fromkeys(CHOSEN_SIZES, divisors(world_size))
    options |= {name: [size] for name, size in fixed.items() if name in CHOSEN_SIZES}
    # Without experts ETP cuts nothing; it follows TP.
    etps = [None] if given.num_experts is None and "etp" not in fixed else options["etp"]
    vp = fixed.get("vp")
    found: list[Sizes] = []
    for pp in options["pp"]:
        dense = _passing(
            (
                Sizes(world_size, tp=tp, cp=cp, pp=pp, vp=vp)
                for tp, cp in product(options["tp"], options["cp"])
            ),
            given,
            (DENSE_GRID_RULES, DENSE_RULES),
            counter,
            choices=len(options["ep"]) * len(etps),
        )
        if not dense:
            continue
        expert = _passing(
            (Sizes(world_size, pp=pp, ep=ep, etp=etp) for ep, etp in product(options["ep"], etps)),
            given,
            (EXPERT_GRID_RULES, EXPERT_RULES),
            counter,
            choices=len(dense),
        )
        experts = [(one.ep, None if one.etp_follows_tp else one.etp) for one in expert]
        both = (
            Sizes(world_size, tp=one.tp, cp=one.cp, pp=pp, vp=vp, ep=ep, etp=etp)
            for one, (ep, etp) in product(dense, experts)
        )
        found += _passing(both, given, (JOINT_GRID_RULES, JOINT_RULES), counter, choices=1)
    found.sort(key=attrgetter(*CHOSEN_SIZES))
    return found


def _passing(
    candidates: Iterable[Sizes],
    given: LayoutConstraints,
    rules: tuple[tuple[GridRule, ...], tuple[ModelRule, ...]],
    excluded: Counter[str],
    *,
    choices: int,
) -> list[Sizes]:
    """Return the candidates that break no rule; count ``choices`` for each of the others."""
    grid_rules, model_rules = rules
    passing = []
    for sizes in candidates:
        broken = next((found for rule in grid_rules if (found := rule(sizes))), None) or next(
            (found for rule in model_rules if (found := rule(sizes, given))), None
        )
        if broken is None:
            passing.append(sizes)
        else:
            excluded[broken.rule] += choices
    return passing
