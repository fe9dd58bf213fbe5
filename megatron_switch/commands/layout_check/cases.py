"""The cases in which a layout check trains: every legal layout, with settings spread over them.

A *case* is a layout and settings that must not change any number (:data:`SETTINGS`: how gradients
are reduced, what is recomputed, how tokens travel, whether an evaluation comes in between), or that
change the numbers of every layout alike (:data:`MEANINGS`: micro-batches, capacity group, what the
loss is averaged over). It is compared with one rank that has the same meanings and the plainest
settings; cases with the same meanings share that *reference*.

Every legal layout of TP x PP x VP x EP x ETP x CP x DP comes once; sequence parallelism is on where
TP is above 1, as Switch layers need it. Settings are spread so that any two of their values, and
any value with any size of any axis, meet in some case where they can
(:mod:`megatron_switch.testing.covering_array`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_switch.layout.grid import Layout
from megatron_switch.layout.grid_rules import broken_grid_rule
from megatron_switch.layout.sizes import FLAGS, Sizes, divisors
from megatron_switch.testing.covering_array import covering_subset, spread

AXES = ("tp", "pp", "vp", "ep", "etp", "cp", "dp")
WORLD_SIZES = (1, 2, 4, 8)
QUICK_RANKS = 4
"""Ranks of the largest layouts of ``--quick``."""
NUM_EXPERTS = 8
SEQUENCE_LENGTH = 16
MICRO_BATCH_SIZE = 2
VOCABULARY = 127
NUM_STEPS = 3
CLIP = 1.0
"""Gradient norm above which gradients are clipped; every step's is above."""
PATTERN = (0, 1, 1, 0)
"""Which of four layers are sparse: with one a stage, the first and the last stage have none."""

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "plain": "",
        "overlap": "--overlap-grad-reduce",
        "distributed": "--use-distributed-optimizer",
        "distributed+overlap": (
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
        ),
    },
    "recompute": {
        "none": "",
        "full": (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        ),
        "moe": "--recompute-granularity selective --recompute-modules moe",
        "attention+mlp": "--recompute-granularity selective --recompute-modules core_attn mlp",
    },
    "dispatch": {"packed": "--switch-dispatch packed", "padded": "--switch-dispatch padded"},
    "evaluation": {"none": "", "between": ""},
}
"""Settings that change no number: the flags of each value, the plainest value first."""

MEANINGS: Mapping[str, Mapping[str, str]] = {
    "micro_batches": {
        str(number): f"--global-batch-size {number * MICRO_BATCH_SIZE}" for number in (2, 4, 8)
    },
    "capacity": {
        "microbatch": "--switch-capacity-group microbatch",
        "sequence": "--switch-capacity-group sequence",
        "probability": "--switch-drop-order probability",
    },
    "loss": {"per micro-batch": "", "per token": "--calculate-per-token-loss"},
}
"""Settings with a meaning: the flags of each value."""

_FACTORS = {**MEANINGS, **SETTINGS}
_VALUES = {factor: tuple(values) for factor, values in _FACTORS.items()}

_MODEL = f"""
    --hidden-size 32 --num-attention-heads 8 --seq-length {SEQUENCE_LENGTH}
    --max-position-embeddings {SEQUENCE_LENGTH} --disable-bias-linear --num-experts {NUM_EXPERTS}
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 16
    --hidden-dropout 0 --attention-dropout 0 --mock-data --micro-batch-size {MICRO_BATCH_SIZE}
    --train-iters {NUM_STEPS} --lr 1e-3 --adam-eps 1e-3 --clip-grad {CLIP} --ddp-bucket-size 16384
    --moe-expert-capacity-factor 1.0 --switch-eval-capacity-factor 1.5 --switch-min-capacity 1
    --moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.1 --eval-iters 1 --rerun-mode disabled
    --logging-level 40 --disable-gloo-process-groups --no-initialization
"""
"""Flags of every case. The router's losses weigh as much as the other one: their part of a gradient
must show.
So must clipping, to which Adam is blind where its epsilon is small against gradients; and a small
one turns rounding errors of small gradients into updates."""


@dataclass(frozen=True)
class Case:
    """A layout with its settings."""

    layout: Layout
    values: Mapping[str, str]
    """One value for each factor of :data:`SETTINGS` and :data:`MEANINGS`, by name."""
    num_layers: int
    """Layers of the model, a multiple of four."""

    @property
    def meaning(self) -> str:
        """What the numbers depend on; equal for cases with the same reference."""
        return ", ".join([f"{self.num_layers} layers", *(self.values[name] for name in MEANINGS)])

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation comes between steps."""
        return self.values["evaluation"] == "between"

    def flags(self, device: str) -> list[str]:
        """Return the command line of ``megatron-switch train``.

        Args:
            device: ``cuda`` or ``cpu``.
        """
        argv = [*_MODEL.split(), "--switch-device", device]
        pattern = PATTERN * (self.num_layers // len(PATTERN))
        argv += ["--num-layers", str(self.num_layers)]
        argv += ["--moe-layer-freq", f"[{','.join(map(str, pattern))}]"]
        for name, size in self.sizes().items():
            if name in FLAGS and not (name == "vp" and size == 1):
                argv += [FLAGS[name], str(size)]
        if self.layout.tp > 1:
            argv.append("--sequence-parallel")
        for factor, value in self.values.items():
            argv += _FACTORS[factor][value].split()
        return argv

    def sizes(self) -> dict[str, int]:
        """Return the parallel sizes by name."""
        return {name: getattr(self.layout, name) for name in AXES}

    def reference(self) -> "Case":
        """Return the case of one rank that this one must equal."""
        plain = {factor: next(iter(values)) for factor, values in SETTINGS.items()}
        meanings = {name: self.values[name] for name in MEANINGS}
        values = {**plain, "evaluation": "between", **meanings}
        return Case(Layout(1), values, self.num_layers)

    def __str__(self) -> str:
        """Return layout and settings as one line."""
        sizes = " ".join(f"{name.upper()} {size}" for name, size in self.sizes().items())
        return f"{self.layout.world_size} ranks: {sizes}; {', '.join(self.values.values())}"


def all_cases(max_ranks: int, world_sizes: Sequence[int] = WORLD_SIZES) -> list[Case]:
    """Return one case for every legal layout on up to ``max_ranks`` ranks.

    Args:
        max_ranks: Largest number of ranks.
        world_sizes: Numbers of ranks to choose from.
    """
    layouts = [one for size in world_sizes if size <= max_ranks for one in legal_layouts(size)]
    rows = spread(
        [{axis: getattr(one, axis) for axis in AXES} for one in layouts],
        _VALUES,
        allowed=_is_possible,
    )
    return [_case(one, row) for one, row in zip(layouts, rows, strict=True)]


def quick_cases(cases: Sequence[Case]) -> list[Case]:
    """Return few of the cases: every two values that meet in some case still meet in one."""
    rows = [{**case.sizes(), **case.values} for case in cases]
    return [cases[index] for index in covering_subset(rows)]


def legal_layouts(world_size: int) -> list[Layout]:
    """Return every layout of the check's model on so many ranks, plain ones first."""
    one_of = divisors(world_size)
    found = []
    for tp, pp, vp, ep, etp, cp in product(one_of, one_of, (1, 2), *3 * [one_of]):
        sizes = Sizes(world_size, tp=tp, pp=pp, vp=vp, ep=ep, etp=etp, cp=cp)
        if broken_grid_rule(sizes) is None and NUM_EXPERTS % ep == 0:
            found.append(Layout.of(sizes))
    return found


def _case(layout: Layout, row: Mapping[str, Any]) -> Case:
    values = {factor: row[factor] for factor in _FACTORS}
    return Case(layout, values, max(len(PATTERN), layout.pp * layout.vp))


def _is_possible(row: Mapping[str, Any]) -> bool:
    """Whether micro-batches divide over replicas, and over stages where they interleave.

    Eight of them take long, and come only where no smaller number is possible.
    """
    granule = row["dp"] * (row["pp"] if row["vp"] > 1 else 1)
    number = int(row["micro_batches"])
    return number % granule == 0 and (number < 8 or granule == 8)
