"""What a run computed, by names that mean the same in every layout, and how two runs differ.

A rank holds a part of most values. :class:`Values` collects the parts that it holds, replicas
included, so that a copy which has drifted from the others shows too. :class:`WholeValues` are those
of a run on one rank, which holds everything. :func:`report` says of one rank how its parts differ
from the whole, in numbers small enough to send, and :func:`verdict_of` puts those of all ranks
together.

Two tensors are equal where the norm of their difference is at most :data:`TOLERANCE` of the norm of
the reference. Drop sets must be identical, except for tokens whose two best experts were closer in
probability than that, because rounding decides there: they are *near ties*, and listed.

Shape letters: T tokens of this rank's part of one micro-batch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_switch.testing.global_start import Part

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Routed:
    """How one micro-batch was routed on this rank, by one layer in one step."""

    step: int
    layer: int
    micro_batch: int
    position_T: Tensor
    """Place of each token in the whole micro-batch, batch-major."""
    expert_T: Tensor
    kept_T: Tensor
    margin_T: Tensor
    """By how much the best expert's probability is above the second's."""

    @property
    def key(self) -> tuple[int, int, int]:
        """What names the micro-batch."""
        return self.step, self.layer, self.micro_batch


@dataclass
class Values:
    """What one rank holds of a run's values."""

    scalars: dict[str, float] = field(default_factory=dict)
    tensors: list[tuple[str, Part]] = field(default_factory=list)
    """What a tensor is (``gradient 1``, ``parameter``), and this rank's part of it."""
    routed: list[Routed] = field(default_factory=list)


@dataclass(frozen=True)
class WholeValues:
    """All values of a run on one rank."""

    scalars: Mapping[str, float]
    tensors: Mapping[str, Tensor]
    """By name; an expert's matrices have names of their own."""
    routed: Mapping[tuple[int, int, int], Routed]
    """By step, layer and micro-batch, in the order of positions."""

    @classmethod
    def of(cls, values: Values) -> "WholeValues":
        """Put the parts of the only rank together."""
        tensors: dict[str, Tensor] = {}
        for kind, part in values.tensors:
            name, whole_shape, place = _named(kind, part)
            if name not in tensors:
                tensors[name] = torch.full(whole_shape, math.nan)
            tensors[name][place] = part.values.reshape(tensors[name][place].shape).cpu()
        routed = {one.key: one for one in values.routed}
        assert len(routed) == len(values.routed), "a micro-batch was routed twice"
        return cls(dict(values.scalars), tensors, routed)

    def without(self, part: str) -> "WholeValues":
        """Return the values without the scalars with a certain part of a name."""
        kept = {name: value for name, value in self.scalars.items() if part not in name}
        return replace(self, scalars=kept)


@dataclass(frozen=True)
class Deviation:
    """How far one rank's part of a value is from the reference."""

    name: str
    place: tuple[tuple[int, int], ...]
    """Start and end of the part along every dim: the same for replicas."""
    squared: float
    """Squared norm of the difference, over that of the whole reference."""
    share: float
    """Elements of the part over those of the whole."""


@dataclass(frozen=True)
class Report:
    """What one rank has to say about its parts."""

    tensors: Sequence[Deviation]
    scalars: Mapping[str, float]
    """Relative deviation."""
    tokens: int
    """Tokens whose routing was compared."""
    unlike: Sequence[str]
    """Tokens that went elsewhere, or were dropped instead of kept."""
    near_ties: Sequence[str]
    """Those of them for which rounding decides."""


@dataclass(frozen=True)
class Verdict:
    """How a run's values differ from the reference's, over all ranks."""

    deviation: Mapping[str, float]
    """Relative deviation of every scalar and tensor."""
    unlike: Sequence[str]
    near_ties: Sequence[str]

    @property
    def wrong(self) -> dict[str, float]:
        """Return the values that are not equal, the worst first."""
        bad = {name: by for name, by in self.deviation.items() if not by <= TOLERANCE}
        return dict(sorted(bad.items(), key=lambda item: -item[1]))

    @property
    def equal(self) -> bool:
        """Whether every value is the reference's."""
        return not self.wrong and not self.unlike

    def worst(self, *beginnings: str) -> float:
        """Return the greatest deviation among values whose name begins so; NaN if there is none."""
        found = [by for name, by in self.deviation.items() if name.startswith(beginnings)]
        return max(found, default=math.nan)


def report(values: Values, reference: WholeValues) -> Report:
    """Compare what this rank holds with the reference."""
    unlike: list[str] = []
    near_ties: list[str] = []
    for one in values.routed:
        _compare_routing(one, reference.routed[one.key], unlike, near_ties)
    return Report(
        tensors=[_deviation(kind, part, reference) for kind, part in values.tensors],
        scalars={
            name: _relative(value - reference.scalars[name], reference.scalars[name])
            for name, value in values.scalars.items()
        },
        tokens=sum(len(one.position_T) for one in values.routed),
        unlike=unlike,
        near_ties=near_ties,
    )


def verdict_of(reports: Iterable[Report], reference: WholeValues) -> Verdict:
    """Put the reports of all ranks together.

    A value that no rank holds counts as infinitely far away, so that nothing is left out unseen.
    """
    reports = list(reports)
    deviation = {name: math.inf for name in (*reference.scalars, *reference.tensors)}
    for name in reference.scalars:
        seen = [one.scalars[name] for one in reports if name in one.scalars]
        deviation[name] = _greatest(seen) if seen else math.inf
    parts: dict[str, dict[tuple[tuple[int, int], ...], Deviation]] = {}
    for one in reports:
        for found in one.tensors:
            places = parts.setdefault(found.name, {})
            worse = places.get(found.place, found)
            places[found.place] = max(worse, found, key=lambda one: _ordered(one.squared))
    for name, places in parts.items():
        complete = math.isclose(sum(one.share for one in places.values()), 1.0)
        total = sum(one.squared for one in places.values())
        deviation[name] = math.sqrt(total) if complete else math.inf
    unlike = [text for one in reports for text in one.unlike]
    tokens = sum(one.tokens for one in reports)
    wanted = sum(len(one.position_T) for one in reference.routed.values())
    if tokens != wanted:
        unlike.append(f"{tokens} tokens were routed, not {wanted}")
    return Verdict(deviation, unlike, [text for one in reports for text in one.near_ties])


def _named(kind: str, part: Part) -> tuple[str, tuple[int, ...], tuple[slice, ...]]:
    """Return a part's name, the shape of the whole, and its place in it.

    Every expert's matrices count as tensors of their own: the first index of theirs is the expert.
    """
    place = tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
    if ".experts." in part.key and part.shape[0] == 1:
        return f"{kind} of {part.key}[{part.offset[0]}]", part.whole_shape[1:], place[1:]
    return f"{kind} of {part.key}", part.whole_shape, place


def _deviation(kind: str, part: Part, reference: WholeValues) -> Deviation:
    name, _, place = _named(kind, part)
    whole = reference.tensors[name].double()
    expected = whole[place]
    difference = part.values.reshape(expected.shape).cpu().double() - expected
    squared = float(difference.square().sum())
    return Deviation(
        name=name,
        place=tuple((one.start, one.stop) for one in place),
        squared=_relative(squared, float(whole.square().sum())),
        share=expected.numel() / whole.numel(),
    )


def _relative(difference: float, reference: float) -> float:
    if difference == 0.0:
        return 0.0
    return abs(difference / reference) if reference else math.inf


def _ordered(value: float) -> float:
    """Return a key by which NaN is the greatest."""
    return math.inf if math.isnan(value) else value


def _greatest(values: Sequence[float]) -> float:
    return max(values, key=_ordered)


def _compare_routing(one: Routed, whole: Routed, unlike: list[str], near_ties: list[str]) -> None:
    expected = {name: getattr(whole, name)[one.position_T] for name in ("expert_T", "kept_T")}
    margin_T = whole.margin_T[one.position_T]
    differs_T = (one.expert_T != expected["expert_T"]) | (one.kept_T != expected["kept_T"])
    for row in differs_T.nonzero().flatten().tolist():
        text = (
            f"step {one.step}, layer {one.layer}, micro-batch {one.micro_batch}, token "
            f"{int(one.position_T[row])}: expert {int(one.expert_T[row])}"
            f"{_fate(one.kept_T[row])}, not {int(expected['expert_T'][row])}"
            f"{_fate(expected['kept_T'][row])} (margin {float(margin_T[row]):.1e})"
        )
        (near_ties if margin_T[row] < TOLERANCE else unlike).append(text)


def _fate(kept: Tensor) -> str:
    return "" if bool(kept) else " (dropped)"
