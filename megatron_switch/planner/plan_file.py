"""Plans as JSON: what ``megatron-switch plan --json`` prints and the launch scripts are made from.

The file holds the flags of each plan, best first, the shape of the job, and what was predicted, in
bytes and seconds. Readers look at a plan's flags and sizes; everything else is for people.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_switch.errors import LayoutError
from megatron_switch.planner.bottleneck import bottleneck
from megatron_switch.planner.hardware.cluster import hardware_as_json
from megatron_switch.planner.layout_plan import LayoutPlan
from megatron_switch.planner.plan_flags import plan_flags
from megatron_switch.planner.plan_warnings import plan_warnings
from megatron_switch.planner.request import PlanRequest
from megatron_switch.utils.fields import Fields

SCHEMA = "megatron-switch.plan/1"


@dataclass(frozen=True)
class PlannedJob:
    """What a launch needs of a plan.

    Attributes:
        nodes: Nodes of the job.
        gpus_per_node: GPUs, and ranks, of a node.
        flags: Words for ``megatron-switch train``, the model's included, without the data's.
        expert_nodes: Nodes over which an expert group is spread.
        expert_leaves: Leaf switches over which it is spread, at best.
        gpu: Name of the hardware preset or file.
    """

    nodes: int
    gpus_per_node: int
    flags: tuple[str, ...]
    expert_nodes: int
    expert_leaves: int
    gpu: str

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.nodes * self.gpus_per_node


def plans_as_json(
    plans: Sequence[LayoutPlan], request: PlanRequest, model_argv: Sequence[str]
) -> dict[str, object]:
    """Return the object that :func:`read_plan` reads.

    Args:
        plans: BestPlans, best first.
        request: What was planned.
        model_argv: The model's own flags.
    """
    return {
        "schema": SCHEMA,
        "nodes": request.nodes,
        "gpus_per_node": request.hardware.gpus_per_node,
        "hardware": {"name": request.hardware.name, **hardware_as_json(request.hardware)},
        "train_tokens": request.train_tokens,
        "plans": [_plan_as_json(plan, request, model_argv) for plan in plans],
    }


def _plan_as_json(
    plan: LayoutPlan, request: PlanRequest, model_argv: Sequence[str]
) -> dict[str, object]:
    layout, timing = plan.layout, plan.timing
    groups = request.hardware.spreads(layout)
    return {
        "layout": {**layout.given(), "etp": layout.etp, "dp": layout.dp, "edp": layout.edp},
        "training": asdict(plan.training),
        "flags": [*model_argv, *plan_flags(layout, plan.training)],
        "groups": {name: asdict(spread) for name, spread in groups.items()},
        "memory_bytes": {
            **{name.replace(" ", "_"): size for name, size in plan.memory.parts().items()},
            "step": plan.memory.step,
            "host": plan.memory.host,
            "total": plan.memory.total,
        },
        "fullest_stage": plan.stage,
        "seconds": {
            "step": timing.step,
            "arithmetic": timing.compute,
            "expert_weights": timing.weights,
            "optimizer": timing.optimizer,
            **{transfer.name.replace(" ", "_"): transfer.seconds for transfer in timing.transfers},
        },
        "bytes_sent": {
            transfer.name.replace(" ", "_"): {
                "inside_node": transfer.inside,
                "across_nodes": transfer.across,
                "calls": transfer.calls,
            }
            for transfer in timing.transfers
        },
        "bubble": timing.bubble,
        "tokens_per_second_per_gpu": timing.tokens_per_second,
        "useful_mfu": timing.useful_mfu,
        **_whole_training(plan, request.train_tokens),
        "dropped": plan.dropped,
        "lower_bound": not request.hardware.fitted,
        "binding": bottleneck(plan, request.hardware),
        "warnings": plan_warnings(plan, request),
    }


def _whole_training(plan: LayoutPlan, tokens: int | None) -> dict[str, float]:
    if tokens is None:
        return {}
    return {
        "training_seconds": plan.seconds_for(tokens),
        "training_gpu_hours": plan.gpu_hours_for(tokens),
    }


def read_plan(path: Path, *, world_size: int | None = None, number: int = 1) -> PlannedJob:
    """Return a plan from a file.

    Args:
        path: What ``megatron-switch plan --json`` printed.
        world_size: Ranks of the job that it is for, where they are known.
        number: Which of the plans, from 1.

    Raises:
        ConfigError: If the file is malformed; with line and key.
        LayoutError: If the plan is for another number of ranks.
    """
    file = Fields.read(path, "plan file")
    schema = file.text("schema")
    if schema != SCHEMA:
        raise file.error("schema", f"expected '{SCHEMA}', found '{schema}'.")
    nodes = file.integer("nodes")
    gpus_per_node = file.integer("gpus_per_node")
    plans = file.objects("plans")
    if not 1 <= number <= len(plans):
        raise file.error("plans", f"holds {len(plans)} plans, and number {number} was requested.")
    plan = plans[number - 1]
    ranks = plan.inner("layout").integer("world_size")
    if ranks != nodes * gpus_per_node:
        raise LayoutError(
            f"{plan.inner('layout').where('world_size')}: {ranks} ranks do not fill {nodes} nodes "
            f"x {gpus_per_node} GPUs. Plan again with --nodes and --gpus-per-node of the job."
        )
    if world_size is not None and ranks != world_size:
        raise LayoutError(
            f"The plan in {path} is for {ranks} ranks ({nodes} nodes x {gpus_per_node} GPUs), but "
            f"the job has {world_size}. Plan again for this job, or ask for {nodes} nodes."
        )
    experts = plan.inner("groups").inner("ETP x EP")
    return PlannedJob(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        flags=tuple(plan.texts("flags")),
        expert_nodes=experts.integer("nodes"),
        expert_leaves=experts.integer("leaves"),
        gpu=file.inner("hardware").text("name"),
    )
