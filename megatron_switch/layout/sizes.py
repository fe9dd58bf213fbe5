"""Parallel sizes as a user gives them: numbers that may or may not form a grid of ranks.

Two grids share the ranks and the pipeline stages:

    dense grid    TP x CP x PP x DP   = ranks
    expert grid   ETP x EP x PP x EDP = ranks

EP is no factor of the dense grid and TP none of the expert grid: TP 4 with EP 8 on 8 ranks is
legal when ETP is 1. DP and EDP are what the other factors leave. Which sizes are legal is said in
:mod:`megatron_switch.layout.grid_rules` and :mod:`megatron_switch.layout.model_rules`; legal ones
are a :class:`~megatron_switch.layout.grid.Layout`.
"""

import math
from dataclasses import dataclass, field

from megatron_switch.flags.values import FlagValues

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


@dataclass(frozen=True, init=False)
class Sizes:
    """Number of ranks and parallel sizes as requested; legal or not.

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
        # By hand, because etp is given as int | None and read as int; through vars(), because the
        # class is frozen.
        vars(self).update(
            world_size=world_size,
            tp=tp,
            cp=cp,
            pp=pp,
            ep=ep,
            etp=tp if etp is None else etp,
            vp=1 if vp is None else vp,
            order=order,
            etp_follows_tp=etp is None,
        )
        self._check()

    def _check(self) -> None:
        """Accept any sizes; a Layout accepts legal ones only."""

    @classmethod
    def of_flags(cls, world_size: int, flags: FlagValues) -> "Sizes":
        """Return the sizes that the flags of a training on ``world_size`` ranks request."""
        order = rank_order(tp_pp_dp_mapping=flags.on("use-tp-pp-dp-mapping"))
        return Sizes(world_size, **given_sizes(flags), order=order)

    @property
    def dp(self) -> int:
        """Data-parallel size: copies of the dense layers (rounded down in an illegal layout)."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Expert-data-parallel size: copies of each expert (rounded down in an illegal layout)."""
        return self.world_size // (self.etp * self.ep * self.pp)

    def given(self) -> dict[str, int]:
        """Return the sizes as requested, by name; without ETP where it follows TP."""
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


def given_sizes(flags: FlagValues) -> dict[str, int]:
    """Return the sizes that flags of a training set, by name; the others are left out."""
    found = {name: flags.integer(flag.removeprefix("--"), None) for name, flag in FLAGS.items()}
    return {name: size for name, size in found.items() if size is not None}


def rank_order(*, tp_pp_dp_mapping: bool) -> str:
    """Return the order of ranks with or without ``--use-tp-pp-dp-mapping``."""
    return TP_PP_DP_ORDER if tp_pp_dp_mapping else DEFAULT_ORDER


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number``, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _grid_line(factors: dict[str, int], last: str, world_size: int) -> str:
    known = math.prod(factors.values())
    names = " x ".join(f"{name} {size}" for name, size in factors.items())
    if world_size % known == 0:
        return f"{names} x {last} {world_size // known} = {world_size} ranks"
    return f"{names} x {last} ? = {world_size} ranks ({world_size} / {known} is not whole)"
