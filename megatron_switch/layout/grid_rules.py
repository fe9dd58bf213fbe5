"""Which sizes form both grids: the rules of Megatron-Core 0.19.2's ``initialize_model_parallel``.

There are three tables of rules, by the sizes that they read: those of the dense grid, those of the
expert grid, or both. The grids share nothing but the pipeline stages, so that a search for legal
sizes (:mod:`megatron_switch.planner.legal_sizes`) can filter each grid by itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_switch.layout.sizes import DEFAULT_ORDER, FLAGS, TP_PP_DP_ORDER, Sizes


@dataclass(frozen=True)
class BrokenRule:
    """Why sizes are refused.

    Attributes:
        rule: What must hold, without values; the same for all sizes that break it.
        message: The rule with the values that break it. A whole sentence.
        way_out: What to set instead, with the flag's name; empty where the nearest legal
            settings say it all.
    """

    rule: str
    message: str
    way_out: str = ""

    @classmethod
    def of(cls, rule: str, values: str, way_out: str = "") -> "BrokenRule":
        """Return the rule whose message is ``RULE, but VALUES.``."""
        return cls(rule, f"{rule}, but {values}.", way_out)

    def __str__(self) -> str:
        """Return message and way out."""
        return f"{self.message} {self.way_out}".rstrip()


GridRule = Callable[[Sizes], BrokenRule | None]
"""Returns what is wrong with sizes, or None where the rule holds."""


def broken_grid_rule(sizes: Sizes) -> BrokenRule | None:
    """Return the first rule of the two grids that ``sizes`` break, or None where all hold."""
    for rule in (*DENSE_GRID_RULES, *EXPERT_GRID_RULES, *JOINT_GRID_RULES):
        broken = rule(sizes)
        if broken is not None:
            return broken
    return None


def _positive(sizes: Sizes) -> BrokenRule | None:
    for name, flag in {"world_size": "the number of ranks", **FLAGS}.items():
        if getattr(sizes, name) < 1:
            return BrokenRule.of(
                "Every parallel size is at least 1", f"{flag} is {getattr(sizes, name)}"
            )
    return None


def _known_order(sizes: Sizes) -> BrokenRule | None:
    if sorted(sizes.order.split("-")) == sorted(DEFAULT_ORDER.split("-")):
        return None
    return BrokenRule(
        "The order of ranks names each axis once",
        f"The order of ranks names each of tp, cp, ep, dp and pp once, but is '{sizes.order}'.",
        f"Use '{DEFAULT_ORDER}', or '{TP_PP_DP_ORDER}' (--use-tp-pp-dp-mapping).",
    )


def _dense_grid_covers_all_ranks(sizes: Sizes) -> BrokenRule | None:
    return _covers_all_ranks(sizes, "dense", {"TP": sizes.tp, "CP": sizes.cp, "PP": sizes.pp})


def _expert_grid_covers_all_ranks(sizes: Sizes) -> BrokenRule | None:
    return _covers_all_ranks(sizes, "expert", {"ETP": sizes.etp, "EP": sizes.ep, "PP": sizes.pp})


def _covers_all_ranks(sizes: Sizes, grid: str, factors: dict[str, int]) -> BrokenRule | None:
    known = math.prod(factors.values())
    if sizes.world_size % known == 0:
        return None
    names = " x ".join(factors)
    count = f"{names} = {' x '.join(map(str, factors.values()))} = {known}"
    shortfall = (
        f"it needs at least {count} ranks."
        if known > sizes.world_size
        else f"{count} does not divide {sizes.world_size}."
    )
    return BrokenRule(
        f"{names} must divide the number of ranks",
        f"{sizes.world_size} ranks cannot form the {grid} grid: {shortfall}",
    )


def _virtual_needs_pipeline(sizes: Sizes) -> BrokenRule | None:
    if sizes.vp == 1 or sizes.pp > 1:
        return None
    return BrokenRule(
        "Virtual pipeline chunks need more than one pipeline stage",
        f"Virtual pipeline chunks ({FLAGS['vp']} {sizes.vp}) need more than one pipeline stage, "
        f"but {FLAGS['pp']} is {sizes.pp}.",
    )


def _same_pipelines(sizes: Sizes) -> BrokenRule | None:
    """Dense and expert layers of a stage must be on the same ranks."""
    axes = sizes.order.split("-")
    if sizes.pp == 1 or axes[-1] == "pp":  # then a stage is one block of ranks on either grid
        return None
    dense = {"tp": sizes.tp, "cp": sizes.cp, "ep": 1, "dp": sizes.dp}
    expert = {"tp": sizes.etp, "cp": 1, "ep": sizes.ep, "dp": sizes.edp}
    # A stage recurs every (product of the faster axes) ranks; both that and DP must agree.
    faster = axes[: axes.index("pp")]
    strides = [math.prod(grid[axis] for axis in faster) for grid in (dense, expert)]
    if strides[0] == strides[1] and sizes.dp == sizes.edp:
        return None
    return BrokenRule(
        "With --use-tp-pp-dp-mapping and pipeline stages DP must equal EDP",
        f"With rank order '{sizes.order}' (--use-tp-pp-dp-mapping) and {sizes.pp} pipeline stages, "
        f"DP must equal EDP, that is TP x CP = ETP x EP, but TP x CP = {sizes.tp * sizes.cp} and "
        f"ETP x EP = {sizes.etp * sizes.ep}.",
        f"Omit --use-tp-pp-dp-mapping (order '{DEFAULT_ORDER}'), or change the sizes.",
    )


DENSE_GRID_RULES: tuple[GridRule, ...] = (
    _positive,
    _known_order,
    _dense_grid_covers_all_ranks,
    _virtual_needs_pipeline,
)
"""Rules that read TP, CP, PP and VP only."""

EXPERT_GRID_RULES: tuple[GridRule, ...] = (_positive, _expert_grid_covers_all_ranks)
"""Rules that read ETP, EP and PP only."""

JOINT_GRID_RULES: tuple[GridRule, ...] = (_same_pipelines,)
"""Rules that read sizes of both grids."""
