"""Parallel sizes as they were asked for, and whether they form a rank grid.

Two grids lie over the same ranks, and both must cover every one of them:

    dense grid    TP  x CP x PP x DP     attention, dense layers, embeddings, router
    expert grid   ETP x EP x PP x EDP    the experts

EP is therefore no factor of the dense grid, nor TP and CP of the expert grid: TP 4 with EP 8 on
8 ranks is legal when ETP is 1. DP and EDP are what the other factors leave. When a rule is
broken, the error shows both grids, the rule with its values, and the legal settings that are
nearest to what was asked for.

The rules are those of ``megatron.core.parallel_state.initialize_model_parallel`` 0.19.2.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product

from megatron_switch.errors import LayoutError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Which axis varies fastest from rank to rank, first to last. Experts read tp as ETP, dp as EDP."""

TP_PP_DP_ORDER = "tp-cp-ep-pp-dp"
"""The order of ``--use-tp-pp-dp-mapping``."""

FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "cp": "--context-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "vp": "--num-virtual-stages-per-pipeline-rank",
}
"""The flag that sets each size. The number of ranks has none: it is what was launched."""

_SUGGESTIONS = 3  # nearest legal settings shown for the given number of ranks
_TRIED = 16  # values tried for each size, so that pairs of changes take milliseconds


@dataclass(frozen=True, init=False)
class Sizes:
    """Number of ranks and the factors they were asked to form; legal or not.

    Attributes:
        world_size: Ranks in the job.
        tp: Tensor-parallel size of the dense layers.
        cp: Context-parallel size.
        pp: Pipeline stages.
        ep: Expert-parallel size: ranks over which the experts of a layer are spread.
        etp: Expert-tensor-parallel size: ranks over which one expert is cut.
        vp: Model chunks per pipeline stage (virtual pipeline); 1 is none.
        order: Axes from fastest to slowest, all five of tp, cp, ep, dp, pp.
        etp_follows_tp: ETP was not given, so that a change of TP changes it too.
    """

    world_size: int
    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    vp: int
    order: str
    etp_follows_tp: bool = field(compare=False, repr=False)

    def __init__(
        self,
        world_size: int,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        vp: int | None = None,
        order: str = DEFAULT_ORDER,
    ) -> None:
        """Keep the sizes; ``etp=None`` means TP's size and ``vp=None`` none, as in Megatron."""
        # Written out because etp is given as int | None and read as int; that is also why
        # attributes are set through object: the class is frozen.
        values = {
            "world_size": world_size,
            "tp": tp,
            "cp": cp,
            "pp": pp,
            "ep": ep,
            "etp": tp if etp is None else etp,
            "vp": 1 if vp is None else vp,
            "order": order,
            "etp_follows_tp": etp is None,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def dp(self) -> int:
        """Data-parallel size: copies of the dense layers (rounded down in an illegal layout)."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Expert-data-parallel size: copies of each expert (rounded down in an illegal layout)."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def given(self) -> dict[str, int]:
        """Return what was asked for, by name: all sizes, without ETP where it follows TP."""
        names = ["world_size", *FLAGS]
        if self.etp_follows_tp:
            names.remove("etp")
        return {name: getattr(self, name) for name in names}

    def changed(self, **changes: int) -> "Sizes":
        """Return these sizes with some replaced; ETP goes with TP where it was not given."""
        return Sizes(**{**self.given(), **changes}, order=self.order)

    def grids(self) -> str:
        """Return two lines: each grid with every factor and its value."""
        dense = _grid_line({"TP": self.tp, "CP": self.cp, "PP": self.pp}, "DP", self.world_size)
        expert = _grid_line({"ETP": self.etp, "EP": self.ep, "PP": self.pp}, "EDP", self.world_size)
        return f"  dense grid:  {dense}\n  expert grid: {expert}"


@dataclass(frozen=True)
class BrokenRule:
    """Why sizes are refused.

    Attributes:
        rule: What must hold, with the values that break it. A whole sentence.
        way_out: What to set instead, with the flag's name; empty where the nearest legal
            settings say it all.
    """

    rule: str
    way_out: str = ""


def broken_grid_rule(sizes: Sizes) -> BrokenRule | None:
    """Return the first rule of the two grids that ``sizes`` break, or None where all hold."""
    return (
        _positive(sizes)
        or _known_order(sizes)
        or _covers_all_ranks(sizes, "dense", {"TP": sizes.tp, "CP": sizes.cp, "PP": sizes.pp})
        or _covers_all_ranks(sizes, "expert", {"ETP": sizes.etp, "EP": sizes.ep, "PP": sizes.pp})
        or _same_pipelines(sizes)
        or _virtual_needs_pipeline(sizes)
    )


def layout_error(
    broken: list[BrokenRule],
    sizes: Sizes,
    is_legal: Callable[[Sizes], bool],
    *,
    also: Callable[[Sizes], str] = lambda sizes: "",
) -> LayoutError:
    """Return the error for broken rules: each with its values and way out, grids, suggestions.

    Args:
        broken: The rules, at least one.
        sizes: The sizes that break them.
        is_legal: Whether other sizes would be accepted; decides what is suggested.
        also: Returns the flags, besides sizes, that a suggestion needs.
    """
    lines = [f"{rule.rule} {rule.way_out}".rstrip() for rule in broken]
    if _positive(sizes) is None:
        lines.append(sizes.grids())
        suggestions = nearest_legal(sizes, is_legal)
        if suggestions:
            lines.append("Nearest legal settings:")
            lines += [f"  {describe_change(sizes, legal, also(legal))}" for legal in suggestions]
    return LayoutError("\n".join(lines))


def nearest_legal(sizes: Sizes, is_legal: Callable[[Sizes], bool]) -> list[Sizes]:
    """Return legal settings that change one size of ``sizes``, else two; best first.

    Near means few doublings or halvings, and no kind of parallelism that was not asked for. At
    most three keep the number of ranks, and one last changes it, because hardware is given.
    Sizes tried are the divisors of the number of ranks, and for the number of ranks the multiples
    next to it.
    """
    alternatives = _alternatives(sizes)
    same_ranks: list[Sizes] = []
    other_ranks: list[Sizes] = []
    for num_changes in (1, 2):
        found = [
            legal for legal in _candidates(sizes, alternatives, num_changes) if is_legal(legal)
        ]
        found.sort(key=lambda legal: _distance(sizes, legal))
        same_ranks = [legal for legal in found if legal.world_size == sizes.world_size]
        other_ranks = other_ranks or [legal for legal in found if legal not in same_ranks]
        if same_ranks:
            break
    return same_ranks[:_SUGGESTIONS] + other_ranks[:1]


def describe_change(asked: Sizes, legal: Sizes, also: str = "") -> str:
    """Return the flags that lead from ``asked`` to ``legal``, and the grid that they give."""
    flags = [
        f"{flag} {getattr(legal, name)}"
        for name, flag in FLAGS.items()
        if getattr(legal, name) != getattr(asked, name)
        and not (name == "etp" and legal.etp_follows_tp)
    ]
    if also:
        flags.append(also)
    change = " ".join(flags)
    if legal.world_size != asked.world_size:
        ranks = f"{legal.world_size} ranks instead of {asked.world_size}"
        change = f"{change}, {ranks}" if change else ranks
    gives = f"DP {legal.dp}, EDP {legal.edp}"
    if legal.etp != asked.etp and legal.etp_follows_tp:
        gives = f"ETP {legal.etp}, {gives}"
    return f"{change}  ({gives})"


def _grid_line(factors: dict[str, int], last: str, world_size: int) -> str:
    known = math.prod(factors.values())
    names = " x ".join(f"{name} {size}" for name, size in factors.items())
    if world_size % known == 0:
        return f"{names} x {last} {world_size // known} = {world_size} ranks"
    return f"{names} x {last} ? = {world_size} ranks ({world_size} / {known} is not whole)"


def _positive(sizes: Sizes) -> BrokenRule | None:
    for name, flag in {"world_size": "the number of ranks", **FLAGS}.items():
        if getattr(sizes, name) < 1:
            return BrokenRule(
                f"Every parallel size is at least 1, but {flag} is {getattr(sizes, name)}."
            )
    return None


def _known_order(sizes: Sizes) -> BrokenRule | None:
    if sorted(sizes.order.split("-")) == sorted(DEFAULT_ORDER.split("-")):
        return None
    return BrokenRule(
        f"The order of ranks names each of tp, cp, ep, dp and pp once, but is '{sizes.order}'.",
        f"Use '{DEFAULT_ORDER}', or '{TP_PP_DP_ORDER}' (--use-tp-pp-dp-mapping).",
    )


def _covers_all_ranks(sizes: Sizes, grid: str, factors: dict[str, int]) -> BrokenRule | None:
    known = math.prod(factors.values())
    if sizes.world_size % known == 0:
        return None
    values = " x ".join(map(str, factors.values()))
    count = f"{' x '.join(factors)} = {values} = {known}"
    rule = (
        f"it needs at least {count} ranks."
        if known > sizes.world_size
        else f"{count} does not divide {sizes.world_size}."
    )
    return BrokenRule(f"{sizes.world_size} ranks cannot form the {grid} grid: {rule}")


def _same_pipelines(sizes: Sizes) -> BrokenRule | None:
    """Dense and expert layers of a stage must sit on the same ranks."""
    axes = sizes.order.split("-")
    dense = {"tp": sizes.tp, "cp": sizes.cp, "ep": 1, "dp": sizes.dp}
    expert = {"tp": sizes.etp, "cp": 1, "ep": sizes.ep, "dp": sizes.edp}
    before = axes[: axes.index("pp")]
    strides = [math.prod(grid[axis] for axis in before) for grid in (dense, expert)]
    if sizes.pp == 1 or (strides[0] == strides[1] and (len(before) == 4 or sizes.dp == sizes.edp)):
        return None
    return BrokenRule(
        f"With rank order '{sizes.order}' (--use-tp-pp-dp-mapping) and {sizes.pp} pipeline stages, "
        f"DP must equal EDP, that is TP x CP = ETP x EP, but TP x CP = {sizes.tp * sizes.cp} and "
        f"ETP x EP = {sizes.etp * sizes.ep}.",
        f"Leave --use-tp-pp-dp-mapping away (order '{DEFAULT_ORDER}'), or change the sizes.",
    )


def _virtual_needs_pipeline(sizes: Sizes) -> BrokenRule | None:
    if sizes.vp == 1 or sizes.pp > 1:
        return None
    return BrokenRule(
        f"Virtual pipeline chunks ({FLAGS['vp']} {sizes.vp}) need more than one pipeline stage, "
        f"but {FLAGS['pp']} is {sizes.pp}."
    )


def _alternatives(sizes: Sizes) -> dict[str, list[int]]:
    """Return the other values worth trying for each size."""
    divisors = [n for n in range(1, sizes.world_size + 1) if sizes.world_size % n == 0]
    step = math.lcm(sizes.tp * sizes.cp * sizes.pp, sizes.etp * sizes.ep * sizes.pp)
    below = sizes.world_size // step * step
    choices = {name: divisors for name in ("tp", "cp", "pp", "ep", "etp")}
    choices["vp"] = list(range(1, 9)) if sizes.vp > 1 else [1]
    choices["world_size"] = [ranks for ranks in (below, below + step) if ranks > 0]
    return {name: _others_near(getattr(sizes, name), values) for name, values in choices.items()}


def _others_near(current: int, values: list[int]) -> list[int]:
    """Return the values other than ``current`` that are fewest doublings away."""
    others = [value for value in values if value != current]
    return sorted(others, key=lambda value: abs(math.log2(value / current)))[:_TRIED]


def _candidates(
    sizes: Sizes, alternatives: dict[str, list[int]], num_changes: int
) -> Iterator[Sizes]:
    for names in combinations(alternatives, num_changes):
        for values in product(*(alternatives[name] for name in names)):
            yield sizes.changed(**dict(zip(names, values, strict=True)))


def _distance(asked: Sizes, legal: Sizes) -> tuple[float, str]:
    """Return a sort key: doublings, where a new kind of parallelism counts as two more."""
    steps = math.fabs(math.log2(legal.world_size / asked.world_size))
    for name in FLAGS:
        before, after = getattr(asked, name), getattr(legal, name)
        if before != after and not (name == "etp" and legal.etp_follows_tp):
            steps += abs(math.log2(after / before)) + (2 if before == 1 else 0)
    return steps, describe_change(asked, legal)
