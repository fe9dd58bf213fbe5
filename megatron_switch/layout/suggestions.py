"""The error for illegal sizes: every broken rule, both grids, and the nearest legal settings."""

import math
from collections.abc import Callable, Iterator
from itertools import combinations, product

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid_rules import BrokenRule
from megatron_switch.layout.sizes import FLAGS, Sizes, divisors

_SUGGESTIONS = 3  # nearest legal settings shown for the given number of ranks
_TRIED = 16  # values tried for each size, so that pairs of changes take milliseconds


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
    lines = [str(rule) for rule in broken]
    if min(sizes.given().values()) >= 1:  # or there is no grid to show
        lines.append(sizes.grids())
        suggestions = nearest_legal(sizes, is_legal)
        if suggestions:
            lines.append("Nearest legal settings:")
            lines += [f"  {describe_change(sizes, legal, also(legal))}" for legal in suggestions]
    return LayoutError("\n".join(lines))


def nearest_legal(sizes: Sizes, is_legal: Callable[[Sizes], bool]) -> list[Sizes]:
    """Return legal settings that change one size of ``sizes``, else two; best first.

    Near means few doublings or halvings, and no kind of parallelism that was not asked for. At most
    three keep the number of ranks, and one last changes it, because hardware is given. Sizes tried
    are the divisors of the number of ranks, and for the number of ranks the multiples next to it.
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


def _alternatives(sizes: Sizes) -> dict[str, list[int]]:
    """Return the other values worth trying for each size."""
    step = math.lcm(sizes.tp * sizes.cp * sizes.pp, sizes.etp * sizes.ep * sizes.pp)
    below = sizes.world_size // step * step
    choices = {name: divisors(sizes.world_size) for name in ("tp", "cp", "pp", "ep", "etp")}
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
