"""Risks of a plan: what is likely to slow down or break a training, with the flag to change."""

from megatron_switch.layout.grid import Layout
from megatron_switch.layout.nodes import spread_of
from megatron_switch.planner.hardware.cluster import Hardware
from megatron_switch.planner.layout_plan import LayoutPlan
from megatron_switch.planner.request import PlanRequest

_DROP_LIMIT = 0.01
_ALL_TO_ALL_LIMIT = 0.25
_MEMORY_LIMIT = 0.90
_TENSOR_LIMIT = 8


def plan_warnings(plan: LayoutPlan, request: PlanRequest) -> list[str]:
    """Return the risks, each with its number and the flag that changes it."""
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
    spread = hardware.expert_spread(layout)
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


def worst_leaves(layout: Layout, hardware: Hardware) -> int:
    """Return over how many leaf switches the expert group that is spread most runs."""
    groups = layout.groups("etp_ep")
    per_node, per_leaf = hardware.gpus_per_node, hardware.nodes_per_leaf
    return max(spread_of(group, per_node, per_leaf).leaves for group in groups)
