"""The tutorials' form N = n x m x e: what it means as Megatron's two grids.

``n`` copies of the model for data parallelism, each cut over ``m`` ranks, with the experts spread
over ``e`` ranks. Megatron has no such product. EP is no factor of its dense grid, so that all
``n x e`` groups of ``m`` ranks are data-parallel copies; and experts have a grid of their own.

    dense grid    TP m x DP (n x e)
    expert grid   ETP m x EP e x EDP n
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import Sizes
from megatron_switch.layout.workload import Sharding, Training
from megatron_switch.planner.cost.state import RankState, state_bytes
from megatron_switch.planner.layout_plan import LayoutPlan, best_plan
from megatron_switch.planner.legal_sizes import CHOSEN_SIZES
from megatron_switch.planner.request import PlanRequest
from megatron_switch.planner.search import lower_bound

_SHOWN = 3


@dataclass(frozen=True)
class GridProduct:
    """Data, model and expert ranks of a product."""

    data: int
    model: int
    experts: int

    @classmethod
    def parse(cls, text: str) -> "GridProduct":
        """Return the form that ``text`` writes, such as ``32x4x8``.

        Raises:
            LayoutError: If it is no product of three whole numbers.
        """
        parts = re.fullmatch(r"([1-9]\d*)[xX*]([1-9]\d*)[xX*]([1-9]\d*)", text.replace(" ", ""))
        if parts is None:
            raise LayoutError(
                f"--grid is data x model x expert ranks, such as 32x4x8, got '{text}'."
            )
        return cls(*(int(part) for part in parts.groups()))

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.data * self.model * self.experts

    def layout(self) -> Layout:
        """Return both grids, with ETP equal to TP as the form implies."""
        return Layout(self.world_size, tp=self.model, ep=self.experts, etp=self.model)


def states_by_sharding(
    request: PlanRequest, layout: Layout, training: Training
) -> dict[Sharding, RankState]:
    """Return the state of a rank for each place where optimizer state can live."""
    shardings: tuple[Sharding, ...] = ("replicated", "distributed", "fully_sharded")
    return {
        sharding: state_bytes(request.model, layout, replace(training, sharding=sharding))
        for sharding in shardings
    }


def nearest_that_fit(
    request: PlanRequest, layout: Layout, *, count: int = _SHOWN
) -> list[LayoutPlan]:
    """Return layouts near ``layout`` that fit with the distributed optimizer alone, nearest first.

    Near means few doublings and halvings of sizes.
    """
    plain = replace(request, shardings=("distributed",), offloads=(False,))
    found: list[LayoutPlan] = []
    for sizes in _by_distance(plain, layout):
        plan = best_plan(plain, sizes)
        if plan is not None:
            found.append(plan)
        if len(found) == count:
            break
    return found


def _by_distance(request: PlanRequest, layout: Layout) -> Iterator[Sizes]:
    bound = lower_bound(request)
    budget = request.hardware.budget
    near = [sizes for sizes in request.legal_sizes() if bound.least_state(sizes) <= budget]
    yield from sorted(near, key=lambda sizes: (_distance(layout, sizes), _values(sizes)))


def _distance(here: Sizes, there: Sizes) -> float:
    """Return how many doublings and halvings lead from ``here`` to ``there``."""
    pairs = zip(_values(here), _values(there), strict=True)
    return sum(abs(math.log2(b / a)) for a, b in pairs)


def _values(sizes: Sizes) -> tuple[int, ...]:
    return tuple(getattr(sizes, name) for name in CHOSEN_SIZES)
