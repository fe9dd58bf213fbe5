"""The fastest way to train in one choice of parallel sizes, with its memory and time.

What remains to be chosen are virtual stages, micro-batch size, dispatch mode and how memory is
saved. Without a saving training is fastest, so that savings are tried only where it does not fit,
in the order of their cost.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_switch.layout.grid import Layout
from megatron_switch.layout.model_rules import batch_over_replicas
from megatron_switch.layout.sizes import Sizes, divisors
from megatron_switch.layout.workload import Dispatch, Training
from megatron_switch.planner.cost.activations import extreme_stages
from megatron_switch.planner.cost.lower_bound import LowerBound
from megatron_switch.planner.cost.memory import MemoryByPart, predict_peak
from megatron_switch.planner.cost.state import state_bytes
from megatron_switch.planner.cost.timing import Timing, dropped_share, predict_step
from megatron_switch.planner.memory_saving import NO_SAVING, SAVINGS, MemorySaving
from megatron_switch.planner.request import PlanRequest

_LARGEST_MICRO_BATCH = 64


@dataclass(frozen=True)
class LayoutPlan:
    """One layout with everything decided, and what it costs.

    Attributes:
        layout: The ranks.
        training: Everything else, decided.
        stage: Pipeline stage that needs most memory.
        memory: Of a rank of that stage.
        timing: Of a step.
        dropped: Share of tokens that a balanced router drops.
    """

    layout: Layout
    training: Training
    stage: int
    memory: MemoryByPart
    timing: Timing
    dropped: float

    @property
    def kept_tokens_per_second(self) -> float:
        """Tokens a second of one GPU that reach their expert; what layouts are compared by."""
        return self.timing.tokens_per_second * (1.0 - self.dropped)

    def seconds_for(self, tokens: int) -> float:
        """Return the time of a training over some tokens, without evaluation and saving."""
        return tokens / (self.timing.tokens_per_second * self.layout.world_size)

    def gpu_hours_for(self, tokens: int) -> float:
        """Return what that training takes of all GPUs together."""
        return tokens / self.timing.tokens_per_second / 3600


def best_plan(
    request: PlanRequest, sizes: Sizes, *, least: float = 0.0, bound: LowerBound | None = None
) -> LayoutPlan | None:
    """Return the fastest way to train with these sizes that fits, None where none does.

    Args:
        request: Model, cluster, batch.
        sizes: Parallel sizes.
        least: Kept tokens a second; only a faster way is returned.
        bound: The lower bounds of this request; they rule out most slower ways at little cost.
    """
    model, hardware = request.model, request.hardware
    best: LayoutPlan | None = None
    savings: dict[int, list[tuple[MemorySaving, ...]]] = {}  # those whose state fits, by chunks
    too_large: dict[tuple[int, str], int] = {}  # micro-batch that did not fit, by chunks, dispatch
    for layout, training in _candidates(request, sizes):
        chunks, dispatch, micro = layout.vp, training.dispatch, training.micro_batch_size
        # A larger micro-batch needs more, and so do several chunks a stage instead of one.
        if any(micro >= too_large.get((vp, dispatch), micro + 1) for vp in (1, chunks)):
            continue
        floor = least if best is None else best.kept_tokens_per_second
        dropped = dropped_share(model, layout, training)
        if bound is not None:
            count = training.micro_batches(layout)
            seconds = bound.seconds(sizes, chunks=chunks, micro_batches=count)
            if bound.kept_tokens_per_second(seconds, dropped) <= floor:
                continue
        if chunks not in savings:
            savings[chunks] = _savings_with_room(request, layout, training)
        # Without a saving a layout is fastest; where that has no room, one of the others is.
        first = [row[0] for row in savings[chunks]]
        first = first[:1] if NO_SAVING in first else first
        rates = [
            predict_step(model, layout, saving.applied_to(training), hardware).tokens_per_second
            for saving in first
        ]
        if max(rates, default=0.0) * (1.0 - dropped) <= floor:
            continue
        plan = _fitting(request, layout, training, savings[chunks], dropped)
        if plan is None:
            too_large[chunks, dispatch] = micro
        elif plan.kept_tokens_per_second > floor:
            best = plan
    return best


def can_fit(request: PlanRequest, sizes: Sizes) -> bool:
    """Return whether any way to train with these sizes fits, from those that save most memory."""
    smallest = replace(request, fixed={"vp": 1, "micro_batch_size": 1, **request.fixed})
    return any(
        _room_for(request, predict_peak(request.model, layout, saving.applied_to(training))[1])
        for layout, training in _candidates(smallest, sizes)
        for saving in (row[-1] for row in SAVINGS)
        if saving.is_possible(request, layout)
    )


def evaluate(request: PlanRequest, layout: Layout, training: Training) -> LayoutPlan:
    """Return a layout's memory and time, whether it fits or not."""
    stage, memory = predict_peak(request.model, layout, training)
    timing = predict_step(request.model, layout, training, request.hardware)
    dropped = dropped_share(request.model, layout, training)
    return LayoutPlan(layout, training, stage, memory, timing, dropped)


def _savings_with_room(
    request: PlanRequest, layout: Layout, training: Training
) -> list[tuple[MemorySaving, ...]]:
    """Return the possible savings, by row, with which the state alone fits, without activations."""
    model, found = request.model, []
    for row in SAVINGS:
        steps = tuple(saving for saving in row if saving.is_possible(request, layout))
        if not steps:
            continue
        saved = steps[0].applied_to(training)
        states = [
            state_bytes(model, layout, saved, stage=stage)
            for stage in extreme_stages(model, layout.pp, layout.vp)
        ]
        fullest = max(state.expert.total + state.dense.total for state in states)
        if fullest < request.hardware.budget:
            found.append(steps)
    return found


def _fitting(
    request: PlanRequest,
    layout: Layout,
    training: Training,
    savings: list[tuple[MemorySaving, ...]],
    dropped: float,
) -> LayoutPlan | None:
    """Return the cheapest saving with which the layout fits."""
    found: list[LayoutPlan] = []
    for row in savings:
        for saving in row:
            saved = saving.applied_to(training)
            stage, memory = predict_peak(request.model, layout, saved)
            if not _room_for(request, memory):
                continue
            timing = predict_step(request.model, layout, saved, request.hardware)
            found.append(LayoutPlan(layout, saved, stage, memory, timing, dropped))
            if saving == NO_SAVING:
                return found[0]
            break
    return max(found, key=lambda plan: plan.kept_tokens_per_second, default=None)


def _room_for(request: PlanRequest, memory: MemoryByPart) -> bool:
    """Return whether a GPU has room, and the host for the state of its ranks."""
    hardware = request.hardware
    host = memory.host * hardware.gpus_per_node
    return memory.total <= hardware.budget and host <= hardware.host_memory_gb * 1e9


def _candidates(request: PlanRequest, sizes: Sizes) -> Iterator[tuple[Layout, Training]]:
    """Yield each choice of virtual stages, micro-batch size and dispatch mode, without a saving."""
    model, fixed = request.model, request.fixed
    chunks = divisors(model.decoder.num_layers // sizes.pp) if sizes.pp > 1 else [1]
    chunks = [sizes.vp] if "vp" in fixed else chunks
    micro_batch_sizes = [1 << power for power in range(_LARGEST_MICRO_BATCH.bit_length())]
    if "micro_batch_size" in fixed:
        micro_batch_sizes = [fixed["micro_batch_size"]]
    base = NO_SAVING.applied_to(request.training)
    dispatches: tuple[Dispatch, ...] = request.dispatches if model.num_experts else ("padded",)
    if base.capacity.group == "ep" or (base.capacity.slots is None and base.capacity.factor < 0):
        dispatches = tuple(mode for mode in dispatches if mode == "packed")
    for vp in chunks:
        layout = Layout.of(sizes.changed(vp=vp))
        for micro in micro_batch_sizes:
            if batch_over_replicas(layout, replace(request.constraints, micro_batch_size=micro)):
                continue
            for dispatch in dispatches:
                yield (
                    layout,
                    replace(
                        base,
                        micro_batch_size=micro,
                        dispatch=dispatch,
                        sequence_parallel=sizes.tp > 1,
                    ),
                )
