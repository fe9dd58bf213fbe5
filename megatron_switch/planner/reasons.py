"""Why one layout beats another, what binds it, and what to be wary of. Words, no tables."""

from collections.abc import Sequence

from megatron_switch.layout.grid import Layout
from megatron_switch.layout.nodes import GroupSpread, group_spread, spread_of
from megatron_switch.planner.hardware.cluster import Hardware
from megatron_switch.planner.search import Plan, Request

_DROP_LIMIT = 0.01
_ALL_TO_ALL_LIMIT = 0.25
_MEMORY_LIMIT = 0.90
_TENSOR_LIMIT = 8
_WORTH_NAMING = 0.002
"""Share of a step from which on a difference is worth a word."""


def seconds_by_cause(plan: Plan) -> dict[str, float]:
    """Return where the time of a step goes; the values add up to the step, unless it is fitted."""
    timing = plan.timing
    once = ("dense gradients", "expert gradients")
    causes = {"arithmetic": timing.compute, "host reads": timing.waits}
    for transfer in timing.transfers:
        if transfer.name not in once:
            causes[transfer.name] = transfer.seconds
    busy = sum(causes.values())
    causes["bubble"] = busy * timing.bubble
    causes["optimizer"] = timing.optimizer
    causes["gradients"] = max(0.0, timing.step - busy * (1 + timing.bubble) - timing.optimizer)
    return causes


def layout_name(layout: Layout) -> str:
    """Return the sizes of a layout in a few letters: ``TP4 PP8 VP3 EP128 ETP1``."""
    parts = [f"TP{layout.tp}", f"PP{layout.pp}"]
    parts += [f"VP{layout.vp}"] if layout.vp > 1 else []
    parts += [f"CP{layout.cp}"] if layout.cp > 1 else []
    return " ".join([*parts, f"EP{layout.ep}", f"ETP{layout.etp}"])


def why_better(plan: Plan, other: Plan) -> str:
    """Return in one sentence why ``plan`` stands before ``other``."""
    gain = plan.kept_tokens_per_second / other.kept_tokens_per_second - 1.0
    mine, theirs = seconds_by_cause(plan), seconds_by_cause(other)
    saved = {
        cause: theirs.get(cause, 0.0) - mine.get(cause, 0.0)
        for cause in dict.fromkeys((*mine, *theirs))
    }
    step = other.timing.step
    named = sorted(saved.items(), key=lambda item: -abs(item[1]))
    words = [
        f"{_time(abs(seconds))} {'less' if seconds > 0 else 'more'} {cause}"
        for cause, seconds in named[:3]
        if abs(seconds) > _WORTH_NAMING * step
    ]
    if abs(plan.dropped - other.dropped) > _WORTH_NAMING:
        more = "fewer" if plan.dropped < other.dropped else "more"
        words.append(f"{more} dropped tokens ({plan.dropped:.1%} against {other.dropped:.1%})")
    return f"{gain:.1%} more kept tokens a second: {', '.join(words) or 'nearly the same'}"


def binding_constraint(plan: Plan, hardware: Hardware) -> str:
    """Return in words what keeps this layout from being faster."""
    training = plan.training
    savings = []
    if training.recompute != "none":
        what = "the sparse layers" if training.recompute == "selective" else "every layer"
        savings.append(f"{what} computed twice")
    if training.offload_optimizer:
        savings.append("the optimizer on the host")
    if training.sharding == "fully_sharded":
        savings.append("weights and gradients cut over their copies")
    if savings:
        return f"memory: it fits only with {' and '.join(savings)}"
    causes = seconds_by_cause(plan)
    step = sum(causes.values())
    cause = max(causes, key=lambda name: causes[name])
    if cause == "arithmetic":
        others = {name: value for name, value in causes.items() if name != cause}
        second = max(others, key=lambda name: others[name])
        return (
            f"arithmetic, {causes[cause] / step:.0%} of the step at "
            f"{hardware.gemm_efficiency:.0%} of the peak; then {second}, "
            f"{causes[second] / step:.0%}"
        )
    return f"{cause}, {causes[cause] / step:.0%} of the step"


def expert_spread(layout: Layout, hardware: Hardware) -> GroupSpread:
    """Return where the group runs in which tokens travel to experts."""
    return group_spread(layout, ("etp", "ep"), hardware.gpus_per_node, hardware.nodes_per_leaf)


def warnings_of(plan: Plan, request: Request) -> list[str]:
    """Return what is likely to hurt, each with the number and the flag that changes it."""
    hardware, layout, training = request.hardware, plan.layout, plan.training
    found = []
    if plan.dropped > _DROP_LIMIT:
        found.append(
            f"Even a balanced router drops {plan.dropped:.1%} of the tokens: a capacity group has "
            "too few tokens for each expert. Raise --micro-batch-size or "
            "--moe-expert-capacity-factor, or count over more tokens with "
            "--switch-capacity-group ep."
        )
    share = plan.timing.all_to_all_share
    if share > _ALL_TO_ALL_LIMIT:
        found.append(
            f"All-to-all takes {share:.0%} of the step. Keep the expert group on fewer nodes "
            "(--expert-model-parallel-size), or take wider experts."
        )
    spread = expert_spread(layout, hardware)
    if spread.nodes > 1:
        leaves = worst_leaves(layout, hardware)
        under = "one leaf switch" if leaves == 1 else f"up to {leaves} leaf switches (--topology)"
        found.append(
            f"The expert group of {spread.members} GPUs leaves its node: it is on {spread.nodes} "
            f"nodes under {under}."
        )
    if layout.tp > _TENSOR_LIMIT:
        found.append(
            f"--tensor-model-parallel-size {layout.tp} is above {_TENSOR_LIMIT}: every layer waits "
            "for ranks of other nodes."
        )
    used = (plan.memory.total + hardware.reserved_gb * 1e9) / (hardware.memory_gb * 1e9)
    if used > _MEMORY_LIMIT:
        found.append(
            f"Memory is {used:.0%} full, with {hardware.reserved_gb:g} GB set aside for context "
            "and communicators; imbalance between experts comes on top with packed dispatch."
        )
    if training.sharding == "fully_sharded" and layout.tp * layout.cp > 1:
        found.append(
            "Megatron-FSDP wants CUDA_DEVICE_MAX_CONNECTIONS above 1 or unset, tensor and context "
            "parallelism before Blackwell want 1: Megatron warns of both together."
        )
    return found


def spreads(layout: Layout, hardware: Hardware) -> dict[str, GroupSpread]:
    """Return for each kind of group where it runs, rank 0's for all."""
    kinds: dict[str, Sequence[str]] = {
        "TP": ("tp",),
        "CP": ("cp",),
        "DP": ("dp",),
        "PP": ("pp",),
        "ETP": ("etp",),
        "EP": ("ep",),
        "EDP": ("edp",),
        "ETP x EP": ("etp", "ep"),
    }
    return {
        name: group_spread(layout, tuple(axes), hardware.gpus_per_node, hardware.nodes_per_leaf)
        for name, axes in kinds.items()
    }


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def worst_leaves(layout: Layout, hardware: Hardware) -> int:
    """Return over how many leaf switches the expert group that is spread most runs."""
    groups = layout.groups("etp_ep")
    per_node, per_leaf = hardware.gpus_per_node, hardware.nodes_per_leaf
    return max(spread_of(group, per_node, per_leaf).leaves for group in groups)
