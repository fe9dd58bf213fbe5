"""Rank arithmetic: rank <-> coordinates, and every process group as a list of ranks.

A :class:`Layout` is always legal: sizes that do not form both grids raise LayoutError. Nothing is
tabulated. A rank's coordinates are the digits of its number in a mixed radix whose
digits are the axes, the first of ``order`` varying fastest, so that one group of one rank costs
as much as it has members, whatever the number of ranks.

Coordinates on the dense grid are ``tp, cp, dp, pp``; on the expert grid ``etp, ep, edp, pp``,
where ETP and EDP take the places of tp and dp in ``order``. The pipeline stage is the same on both.

Groups have the members, and come in the order, in which Megatron-Core 0.19.2 creates them; our
names are those of its ``ProcessGroupCollection``, except that the experts' axes are called
``etp`` and ``edp`` (there ``expt_tp`` and ``expt_dp``, or plain ``tp`` in ``tp_ep``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid_rules import broken_grid_rule
from megatron_switch.layout.model_rules import uneven_experts
from megatron_switch.layout.sizes import Sizes
from megatron_switch.layout.suggestions import layout_error

DENSE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "dp_cp": ("dp", "cp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp": ("tp", "dp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
}
"""Groups of the dense grid: the axes along which the members of a group differ."""

EXPERT_GROUPS: Mapping[str, tuple[str, ...]] = {
    "etp": ("etp",),
    "ep": ("ep",),
    "edp": ("edp",),
    "etp_ep": ("etp", "ep"),
    "etp_ep_pp": ("etp", "ep", "pp"),
}
"""Groups of the expert grid: the axes along which the members of a group differ."""

GROUP_NAMES = (*DENSE_GROUPS, *EXPERT_GROUPS, "embedding", "position_embedding")
"""Every group by name. The last two are ends of pipelines: first and last stage, first stage."""


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of one rank on both grids, each counted from 0."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int


@dataclass(frozen=True)
class Grid:
    """Ranks as numbers in a mixed radix.

    Attributes:
        sizes: Size of each axis, from the one that varies fastest to the slowest.
    """

    sizes: Mapping[str, int]

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours on each axis."""
        sizes = list(self.sizes.values())
        return {axis: math.prod(sizes[:i]) for i, axis in enumerate(self.sizes)}

    def coordinate(self, axis: str, rank: int) -> int:
        """Return the coordinate of ``rank`` on ``axis``."""
        return rank // self.strides[axis] % self.sizes[axis]

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at the given coordinates; an axis left out is 0."""
        return sum(self.strides[axis] * place for axis, place in coordinates.items())

    def offsets(self, axes: tuple[str, ...]) -> list[int]:
        """Return, ascending, the ranks whose coordinates differ from rank 0 along ``axes`` only."""
        found = [0]
        for axis, stride in self.strides.items():  # from small strides to large, so ascending
            if axis in axes:
                found = [place * stride + low for place in range(self.sizes[axis]) for low in found]
        return found

    def group(self, axes: tuple[str, ...], rank: int) -> list[int]:
        """Return the ranks, ascending, that differ from ``rank`` along ``axes`` only."""
        # The member whose coordinates along the axes are all 0.
        base = rank - sum(self.strides[axis] * self.coordinate(axis, rank) for axis in axes)
        return [base + offset for offset in self.offsets(axes)]

    def groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Return all groups along ``axes``, in the order of their first ranks."""
        # A group is the offsets along its axes, moved by an offset along all other axes.
        others = tuple(axis for axis in self.sizes if axis not in axes)
        members = self.offsets(axes)
        return [[base + offset for offset in members] for base in self.offsets(others)]


class Layout(Sizes):
    """Parallel sizes that do form both grids, with the arithmetic of their ranks.

    Raises:
        LayoutError: When it is made from sizes that do not cover all ranks on both grids.
    """

    def _check(self) -> None:
        broken = broken_grid_rule(self)
        if broken:
            raise layout_error([broken], self, lambda sizes: broken_grid_rule(sizes) is None)

    @classmethod
    def of(cls, sizes: Sizes) -> Self:
        """Return the layout of ``sizes``; raises LayoutError where they form none."""
        return cls(**sizes.given(), order=sizes.order)

    @property
    def name(self) -> str:
        """The sizes in a few letters: ``TP4 PP8 VP3 EP128 ETP1``; VP and CP only above 1."""
        sizes = {axis: getattr(self, axis) for axis in ("tp", "pp", "vp", "cp", "ep", "etp")}
        shown = (axis for axis, size in sizes.items() if size > 1 or axis not in ("vp", "cp"))
        return " ".join(f"{axis.upper()}{sizes[axis]}" for axis in shown)

    @cached_property
    def dense(self) -> Grid:
        """The grid tp, cp, dp, pp, in the order of the ranks."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        return Grid({axis: sizes[axis] for axis in self.order.split("-") if axis != "ep"})

    @cached_property
    def expert(self) -> Grid:
        """The grid etp, ep, edp, pp, in the order of the ranks."""
        sizes = {"tp": self.etp, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        names = {"tp": "etp", "dp": "edp"}
        axes = [axis for axis in self.order.split("-") if axis != "cp"]
        return Grid({names.get(axis, axis): sizes[axis] for axis in axes})

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of ``rank`` on both grids."""
        self._check_rank(rank)
        dense = {axis: self.dense.coordinate(axis, rank) for axis in self.dense.sizes}
        expert = {axis: self.expert.coordinate(axis, rank) for axis in ("etp", "ep", "edp")}
        return Coordinates(**dense, **expert)

    def dense_rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at the given coordinates of the dense grid."""
        return self.dense.rank({"tp": tp, "cp": cp, "dp": dp, "pp": pp})

    def expert_rank(self, *, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
        """Return the rank at the given coordinates of the expert grid."""
        return self.expert.rank({"etp": etp, "ep": ep, "edp": edp, "pp": pp})

    def group(self, name: str, rank: int) -> list[int]:
        """Return the ranks, ascending, of the group called ``name`` that ``rank`` is in.

        Args:
            name: One of :data:`GROUP_NAMES`.
            rank: Global rank.

        Returns:
            Global ranks. Empty where the rank is in no such group, which only happens for
            ``embedding`` and ``position_embedding``.
        """
        self._check_rank(rank)
        if name in DENSE_GROUPS:
            return self.dense.group(DENSE_GROUPS[name], rank)
        if name in EXPERT_GROUPS:
            return self.expert.group(EXPERT_GROUPS[name], rank)
        ends = _pipeline_ends(name, self.dense.group(("pp",), rank))
        return ends if rank in ends else []

    def groups(self, name: str) -> list[list[int]]:
        """Return all groups called ``name``, in the order in which Megatron creates them."""
        if name in DENSE_GROUPS:
            return self.dense.groups(DENSE_GROUPS[name])
        if name in EXPERT_GROUPS:
            return self.expert.groups(EXPERT_GROUPS[name])
        return [_pipeline_ends(name, pipeline) for pipeline in self.dense.groups(("pp",))]

    def experts_of(self, rank: int, num_experts: int) -> range:
        """Return the global indices of the experts of which ``rank`` holds all or a part.

        With ETP > 1 it holds the share 1/ETP of each of them.

        Raises:
            LayoutError: If the experts do not divide evenly.
        """
        uneven = uneven_experts(num_experts, self.ep)
        if uneven:
            raise LayoutError(str(uneven))
        per_rank = num_experts // self.ep
        first = self.coordinates(rank).ep * per_rank
        return range(first, first + per_rank)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"Rank {rank} is not in this layout: ranks are 0 to {self.world_size - 1}."
            )


def _pipeline_ends(name: str, pipeline: list[int]) -> list[int]:
    """Return the stages that hold word embeddings, or position embeddings, as Megatron does."""
    if name == "position_embedding" or (name == "embedding" and len(pipeline) == 1):
        return pipeline[:1]
    if name == "embedding":
        return [pipeline[0], pipeline[-1]]
    raise LayoutError(f"There is no group called '{name}'; groups are {', '.join(GROUP_NAMES)}.")
