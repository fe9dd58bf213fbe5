"""What is planned, and the fastest way to train with given parallel sizes.

For each choice of sizes the ways differ in micro-batch size, virtual stages, dispatch mode and what
is done to save memory. Without a saving a way is fastest, so that savings are tried only where it
does not fit, in the order of their cost.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from megatron_switch.architecture.model import Architecture
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.model_rules import ModelShape, batch_over_replicas
from megatron_switch.layout.sizes import Sizes, divisors
from megatron_switch.layout.workload import Dispatch, Recompute, Sharding, Training
from megatron_switch.planner.cost.activations import telling_stages
from megatron_switch.planner.cost.lower_bound import Bound
from megatron_switch.planner.cost.memory import MemoryByPart, predict_peak
from megatron_switch.planner.cost.state import state_bytes
from megatron_switch.planner.cost.timing import Timing, dropped_share, predict_step
from megatron_switch.planner.hardware.cluster import Hardware
from megatron_switch.planner.legal_sizes import legal_sizes

_LARGEST_MICRO_BATCH = 64

Saving = tuple[Sharding, bool, Literal["none", "moe", "full"]]
"""Sharding, offload of the optimizer, recompute (``none``, ``moe``, ``full``)."""

LADDERS: tuple[tuple[Saving, ...], ...] = (
    (("distributed", False, "none"), ("distributed", False, "moe"), ("distributed", False, "full")),
    (
        ("fully_sharded", False, "none"),
        ("fully_sharded", False, "moe"),
        ("fully_sharded", False, "full"),
    ),
    (("distributed", True, "none"), ("distributed", True, "moe"), ("distributed", True, "full")),
)
"""Ways to save memory; in each row every step costs more time than the one before."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned.

    Attributes:
        model: The model.
        training: Batch and capacity; dispatch, micro-batch and savings are chosen.
        hardware: The cluster's parts.
        nodes: Nodes.
        dispatches: Dispatch modes to consider.
        shardings: Ways of keeping optimizer state to consider.
        offloads: Whether the optimizer may be on the host.
        fixed: Sizes that were chosen already: ``tp``, ``pp``, ``cp``, ``ep``, ``etp``, ``vp``, and
            ``micro_batch_size``.
    """

    model: Architecture
    training: Training
    hardware: Hardware
    nodes: int
    dispatches: tuple[Dispatch, ...] = ("padded", "packed")
    shardings: tuple[Sharding, ...] = ("distributed", "fully_sharded")
    offloads: tuple[bool, ...] = (False, True)
    fixed: Mapping[str, int] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """GPUs in all."""
        return self.nodes * self.hardware.gpus_per_node

    @cached_property
    def shape(self) -> ModelShape:
        """What sizes have to divide."""
        model, training = self.model, self.training
        is_t5 = model.encoder is not None
        return ModelShape(
            num_experts=model.num_experts or None,
            num_layers=model.decoder.num_layers,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            ffn_hidden_size=model.ffn_hidden_size,
            moe_ffn_hidden_size=model.moe_ffn_hidden_size,
            add_bias_linear=model.add_bias_linear,
            padded_vocab_size=model.padded_vocab_size,
            seq_length=training.seq_length,
            sequence_parallel=True,
            micro_batch_size=self.fixed.get("micro_batch_size", 1),
            global_batch_size=training.global_batch_size,
            capacity_group=training.capacity.group,
            one_stage=is_t5,
            whole_sequences=is_t5 or not training.transformer_engine,
        )

    def legal_sizes(self, excluded: Counter[str] | None = None) -> list[Sizes]:
        """Return the legal choices of sizes that have the fixed ones."""
        return legal_sizes(self.world_size, self.shape, fixed=self.fixed, excluded=excluded)


@dataclass(frozen=True)
class Plan:
    """One layout, worked out.

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


def best_of_choice(
    request: Request, sizes: Sizes, *, least: float = 0.0, bound: Bound | None = None
) -> Plan | None:
    """Return the fastest way to train with these sizes that fits, None where none does.

    Args:
        request: Model, cluster, batch.
        sizes: Parallel sizes.
        least: Kept tokens a second below which a way is not worth working out.
        bound: Of this request; tells of most ways that they are not, for less.
    """
    model, hardware = request.model, request.hardware
    best: Plan | None = None
    ladders: dict[int, list[tuple[Saving, ...]]] = {}  # those whose state fits, by chunks
    too_large: dict[tuple[int, str], int] = {}  # micro-batch that did not fit, by chunks, dispatch
    for layout, training in _ways(request, sizes):
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
        if chunks not in ladders:
            ladders[chunks] = _ladders_with_room(request, layout, training)
        # Without a saving a layout is fastest; where that has no room, one of the others is.
        first = [ladder[0] for ladder in ladders[chunks]]
        first = first[:1] if LADDERS[0][0] in first else first
        rates = [
            predict_step(model, layout, with_saving(training, saving), hardware).tokens_per_second
            for saving in first
        ]
        if max(rates, default=0.0) * (1.0 - dropped) <= floor:
            continue
        plan = _fitting(request, layout, training, ladders[chunks], dropped)
        if plan is None:
            too_large[chunks, dispatch] = micro
        elif plan.kept_tokens_per_second > floor:
            best = plan
    return best


def fits_at_all(request: Request, sizes: Sizes) -> bool:
    """Return whether any way to train with these sizes fits, looking at the thriftiest only."""
    thrifty = replace(request, fixed={"vp": 1, "micro_batch_size": 1, **request.fixed})
    return any(
        _room_for(request, predict_peak(request.model, layout, with_saving(training, saving))[1])
        for layout, training in _ways(thrifty, sizes)
        for saving in (ladder[-1] for ladder in LADDERS)
        if _is_allowed(request, saving, layout)
    )


def with_saving(training: Training, saving: Saving) -> Training:
    """Return ``training`` with a way to save memory."""
    sharding, offload, recompute = saving
    granularity: Recompute = "selective" if recompute == "moe" else recompute
    return replace(
        training,
        sharding=sharding,
        offload_optimizer=offload,
        recompute=granularity,
        recompute_modules=("moe",) if recompute == "moe" else (),
    )


def work_out(
    request: Request, layout: Layout, training: Training, timing: Timing | None = None
) -> Plan:
    """Return a layout's memory and time, whether it fits or not."""
    stage, memory = predict_peak(request.model, layout, training)
    if timing is None:
        timing = predict_step(request.model, layout, training, request.hardware)
    dropped = dropped_share(request.model, layout, training)
    return Plan(layout, training, stage, memory, timing, dropped)


def _ladders_with_room(
    request: Request, layout: Layout, training: Training
) -> list[tuple[Saving, ...]]:
    """Return the ladders whose weights, gradients and optimizer state fit, without any pass."""
    model, found = request.model, []
    for ladder in LADDERS:
        steps = tuple(saving for saving in ladder if _is_allowed(request, saving, layout))
        if not steps:
            continue
        saved = with_saving(training, steps[0])
        states = [
            state_bytes(model, layout, saved, stage=stage)
            for stage in telling_stages(model, layout.pp, layout.vp)
        ]
        fullest = max(state.expert.total + state.dense.total for state in states)
        if fullest < request.hardware.budget:
            found.append(steps)
    return found


def _fitting(
    request: Request,
    layout: Layout,
    training: Training,
    ladders: list[tuple[Saving, ...]],
    dropped: float,
) -> Plan | None:
    """Return the cheapest saving with which the layout fits."""
    found: list[Plan] = []
    for ladder in ladders:
        for saving in ladder:
            saved = with_saving(training, saving)
            stage, memory = predict_peak(request.model, layout, saved)
            if not _room_for(request, memory):
                continue
            timing = predict_step(request.model, layout, saved, request.hardware)
            found.append(Plan(layout, saved, stage, memory, timing, dropped))
            if saving == LADDERS[0][0]:
                return found[0]
            break
    return max(found, key=lambda plan: plan.kept_tokens_per_second, default=None)


def _is_allowed(request: Request, saving: Saving, layout: Layout) -> bool:
    sharding, offload, recompute = saving
    if sharding == "fully_sharded" and layout.pp > 1:
        return False  # Megatron-FSDP's mesh of ranks has no axis for stages
    if recompute == "moe" and not request.model.num_experts:
        return False
    return sharding in request.shardings and offload in request.offloads


def _room_for(request: Request, memory: MemoryByPart) -> bool:
    """Return whether a GPU has room, and its share of the host."""
    hardware = request.hardware
    host = memory.host * hardware.gpus_per_node
    return memory.total <= hardware.budget and host <= hardware.host_memory_gb * 1e9


def _ways(request: Request, sizes: Sizes) -> Iterator[tuple[Layout, Training]]:
    """Yield virtual stages, micro-batch sizes and dispatch modes, without a saving."""
    model, fixed = request.model, request.fixed
    chunks = divisors(model.decoder.num_layers // sizes.pp) if sizes.pp > 1 else [1]
    chunks = [sizes.vp] if "vp" in fixed else chunks
    micro_batch_sizes = [1 << power for power in range(_LARGEST_MICRO_BATCH.bit_length())]
    if "micro_batch_size" in fixed:
        micro_batch_sizes = [fixed["micro_batch_size"]]
    base = with_saving(request.training, LADDERS[0][0])
    dispatches: tuple[Dispatch, ...] = request.dispatches if model.num_experts else ("padded",)
    if base.capacity.group == "ep" or (base.capacity.slots is None and base.capacity.factor < 0):
        dispatches = tuple(mode for mode in dispatches if mode == "packed")
    for vp in chunks:
        layout = Layout.of(sizes.changed(vp=vp))
        for micro in micro_batch_sizes:
            if batch_over_replicas(layout, replace(request.shape, micro_batch_size=micro)):
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
