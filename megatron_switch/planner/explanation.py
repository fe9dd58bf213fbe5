"""One layout line by line: every number with the formula and the values that it comes from."""

from dataclasses import dataclass

from megatron_switch.architecture.parameters import (
    active_parameters,
    stage_parameters,
    total_parameters,
)
from megatron_switch.layout.workload import Slots
from megatron_switch.planner.bottleneck import step_breakdown
from megatron_switch.planner.cost.activations import (
    LayerBytes,
    chunks_under_way,
    layers_of_stage,
    rows_of_experts,
)
from megatron_switch.planner.cost.expert_weights import rows_of_one_expert
from megatron_switch.planner.cost.traffic import Traffic
from megatron_switch.planner.layout_plan import LayoutPlan
from megatron_switch.planner.request import PlanRequest
from megatron_switch.utils.units import decimal_size_text, gigabytes


@dataclass(frozen=True)
class Line:
    """A number and where it comes from.

    Attributes:
        name: What it is.
        formula: How it is computed, with values.
        result: The number, with its unit.
    """

    name: str
    formula: str
    result: str


@dataclass(frozen=True)
class Section:
    """Lines that belong together."""

    title: str
    lines: tuple[Line, ...]


def explain(plan: LayoutPlan, request: PlanRequest) -> list[Section]:
    """Return the computation of a plan, in sections."""
    sections = [
        Section("Parameters", tuple(_parameters(plan, request))),
        Section("Ranks", tuple(_ranks(plan))),
        Section(f"Memory of a rank of stage {plan.stage + 1}", tuple(_memory(plan, request))),
    ]
    if request.model.num_experts:
        sections.insert(2, Section("Capacity", tuple(_capacity(plan, request))))
        sections.append(Section("All-to-all", tuple(_exchange(plan, request))))
    return [*sections, Section("A step", tuple(_step(plan, request)))]


def _parameters(plan: LayoutPlan, request: PlanRequest) -> list[Line]:
    model = request.model
    total, active = total_parameters(model), active_parameters(model)
    matrices, width = model.fc1_parts + 1, model.moe_ffn_hidden_size
    lines = [Line("in all", "dense + experts", f"{total.total / 1e9:.2f}B")]
    if model.num_experts:
        count = total.expert // (matrices * width * model.hidden_size * model.num_experts)
        lines.append(
            Line(
                "experts",
                f"{count} sparse layers x {model.num_experts} x {matrices} x {model.hidden_size} x "
                f"{width}",
                f"{total.expert / 1e9:.2f}B",
            )
        )
    stage = stage_parameters(model, plan.layout, plan.stage)
    return [
        *lines,
        Line("active for a token", "dense + one expert a sparse layer", f"{active / 1e9:.2f}B"),
        Line(
            "on a rank",
            "dense / (TP x PP), experts / (EP x ETP x PP)",
            f"{stage.dense / 1e9:.3f}B + {stage.expert / 1e9:.3f}B",
        ),
    ]


def _ranks(plan: LayoutPlan) -> list[Line]:
    layout = plan.layout
    return [
        Line(
            "dense grid",
            f"TP {layout.tp} x CP {layout.cp} x PP {layout.pp} x DP {layout.dp}",
            str(layout.world_size),
        ),
        Line(
            "expert grid",
            f"ETP {layout.etp} x EP {layout.ep} x PP {layout.pp} x EDP {layout.edp}",
            str(layout.world_size),
        ),
    ]


def _capacity(plan: LayoutPlan, request: PlanRequest) -> list[Line]:
    model, training = request.model, plan.training
    slots = Slots.of(model.num_experts, plan.layout, training)
    rule = f"{training.capacity.rounding}({slots.group_tokens} x {training.capacity.factor} / "
    rule += f"{model.num_experts}), at least {training.capacity.least}"
    if training.capacity.slots is not None:
        rule = "--switch-capacity"
    room = slots.capacity * model.num_experts / slots.group_tokens
    rows = rows_of_experts(model, plan.layout, training)
    return [
        Line("slots of an expert, C", rule, str(slots.capacity)),
        Line("slots for a token", f"C x {model.num_experts} / {slots.group_tokens}", f"{room:.2f}"),
        Line(
            "dropped, balanced router",
            "E / T x sum over n > C of (n - C) x Binomial(T, 1/E)(n)",
            f"{plan.dropped:.2%}",
        ),
        Line("rows of a rank's experts", f"{training.dispatch} dispatch", str(rows)),
        Line(
            "rows of one expert",
            f"{rows} x EP / {model.num_experts}",
            f"{rows_of_one_expert(model, plan.layout, training):.1f}",
        ),
    ]


def _memory(plan: LayoutPlan, request: PlanRequest) -> list[Line]:
    memory, training, layout = plan.memory, plan.training, plan.layout
    layers = layers_of_stage(request.model, layout.pp, layout.vp, plan.stage)
    one = LayerBytes(request.model, layout, training)
    chunks = chunks_under_way(layout, training, plan.stage)
    state = {
        "replicated": "weights + gradients + 12",
        "distributed": "weights + gradients + 12 / copies",
        "fully_sharded": "(weights + gradients + 12) / copies",
    }[training.sharding]
    kept = (
        f"({layers.dense} dense x {decimal_size_text(one.dense)} + "
        f"{layers.sparse} sparse x {decimal_size_text(one.sparse)}) x "
        f"{chunks} of {layout.vp} chunks under way"
    )
    if training.recompute == "full":
        kept = (
            f"{decimal_size_text(one.stream)} a layer kept; buffers hold the layers computed again"
        )
    rows = [
        ("expert state", f"{state} bytes a parameter, {layout.edp} copies", memory.expert_state),
        (
            "dense state",
            f"{state} bytes a parameter, {layout.dp * layout.cp} copies",
            memory.dense_state,
        ),
        ("activations", kept, memory.activations),
        ("routing", "4 T E and indices, in sparse layers", memory.routing),
        ("buffers", "the largest layer at work", memory.buffers),
        ("logits", "instead of buffers, on the last stage", memory.logits),
        ("optimizer's step", "instead of activations", memory.step),
        ("at the peak", "states + the larger of pass and step", memory.total),
        ("room", f"{request.hardware.gpu}, less what is set aside", request.hardware.budget),
    ]
    if memory.host:
        rows.append(("on the host", "masters, moments and gradients of a rank", memory.host))
    return [Line(name, formula, decimal_size_text(size)) for name, formula, size in rows]


def _exchange(plan: LayoutPlan, request: PlanRequest) -> list[Line]:
    spread = request.hardware.expert_spread(plan.layout)
    one = Traffic(request.model, plan.layout, plan.training, request.hardware).exchange()
    network = request.hardware.network
    peers = spread.members - spread.per_node
    return [
        Line(
            "group",
            f"ETP x EP ranks, {spread.per_node} on each of {spread.nodes} nodes under "
            f"{spread.leaves} leaf switches",
            str(spread.members),
        ),
        Line("one exchange", "rows x width x bytes", decimal_size_text(one.payload)),
        Line("across nodes", f"{peers} of {spread.members} peers", decimal_size_text(one.across)),
        Line(
            "flat",
            f"{decimal_size_text(one.across)} / {network.alltoall_gb_s:g} GB/s + {peers} x "
            f"{network.peer_us:g} us + latency",
            f"{one.flat * 1e3:.2f} ms",
        ),
        Line(
            "two-level, for comparison",
            "over the node, then across in larger messages",
            f"{one.two_level * 1e3:.2f} ms",
        ),
    ]


def _step(plan: LayoutPlan, request: PlanRequest) -> list[Line]:
    timing, layout = plan.timing, plan.layout
    micro_batches = plan.training.micro_batches(layout)
    hardware = request.hardware
    formulas = {
        "arithmetic": f"operations / ({hardware.peak_tflops:g} TFLOP/s x "
        f"{hardware.gemm_efficiency:g}), {micro_batches} micro-batches",
        "expert weights": "reading them and adding gradients, beyond the products",
        "bubble": f"(PP - 1) / (VP x micro-batches) = {timing.bubble:.1%} of the work",
        "optimizer": "30 bytes a parameter owned",
        "host reads": "packed dispatch waits for row counts",
        "gradients": "reduce-scatter of gradients, all-gather of weights",
    }
    calls = {transfer.name: transfer for transfer in timing.transfers}
    lines = []
    for cause, seconds in step_breakdown(plan).items():
        formula = formulas.get(cause, "")
        if cause in calls:
            transfer = calls[cause]
            formula = (
                f"{transfer.calls} calls, {gigabytes(transfer.inside)} GB inside and "
                f"{gigabytes(transfer.across)} GB across nodes"
            )
        if seconds > 0:
            lines.append(Line(cause, formula, f"{seconds:.3f} s"))
    if hardware.step_factor != 1.0:
        lines.append(
            Line("fitted", "measured over predicted step", f"x {hardware.step_factor:.2f}")
        )
    rate = f"{timing.tokens_per_second:.0f} tokens/s a GPU, useful MFU {timing.useful_mfu:.1%}"
    return [*lines, Line("step", rate, f"{timing.step:.3f} s")]
