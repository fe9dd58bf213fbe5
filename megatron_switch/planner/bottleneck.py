"""What the time of a step goes to, what limits it, and why one plan is faster than another."""

from megatron_switch.planner.hardware.cluster import Hardware
from megatron_switch.planner.layout_plan import LayoutPlan

_WORTH_NAMING = 0.002
"""Share of a step from which on a difference is named."""


def step_breakdown(plan: LayoutPlan) -> dict[str, float]:
    """Return where the time of a step goes; the values add up to the step, unless it is fitted."""
    timing = plan.timing
    once = ("dense gradients", "expert gradients")
    causes = {
        "arithmetic": timing.compute,
        "expert weights": timing.weights,
        "host reads": timing.waits,
    }
    for transfer in timing.transfers:
        if transfer.name not in once:
            causes[transfer.name] = transfer.seconds
    busy = sum(causes.values())
    causes["bubble"] = busy * timing.bubble
    causes["optimizer"] = timing.optimizer
    causes["gradients"] = max(0.0, timing.step - busy * (1 + timing.bubble) - timing.optimizer)
    return causes


def bottleneck(plan: LayoutPlan, hardware: Hardware) -> str:
    """Return in words what limits the speed of this plan."""
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
    causes = step_breakdown(plan)
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


def why_faster(plan: LayoutPlan, other: LayoutPlan) -> str:
    """Return in one sentence why ``plan`` is faster than ``other``."""
    gain = plan.kept_tokens_per_second / other.kept_tokens_per_second - 1.0
    mine, theirs = step_breakdown(plan), step_breakdown(other)
    saved = {
        cause: theirs.get(cause, 0.0) - mine.get(cause, 0.0)
        for cause in dict.fromkeys((*mine, *theirs))
    }
    step = other.timing.step
    named = sorted(saved.items(), key=lambda item: -abs(item[1]))
    reasons = [
        f"{_time(abs(seconds))} {'less' if seconds > 0 else 'more'} {cause}"
        for cause, seconds in named[:3]
        if abs(seconds) > _WORTH_NAMING * step
    ]
    if abs(plan.dropped - other.dropped) > _WORTH_NAMING:
        more = "fewer" if plan.dropped < other.dropped else "more"
        reasons.append(f"{more} dropped tokens ({plan.dropped:.1%} against {other.dropped:.1%})")
    return f"{gain:.1%} more kept tokens a second: {', '.join(reasons) or 'nearly the same'}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
