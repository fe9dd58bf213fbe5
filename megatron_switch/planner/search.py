"""Find the layouts in which a model trains fastest on a cluster, among all that fit.

Every legal layout gets a lower bound of its step time from a few multiplications: arithmetic
without padding, bytes without latency. Layouts are then evaluated in the order of their bounds
(:mod:`megatron_switch.planner.layout_plan`), until the next bound is above the best few found. So
nothing is left out that could have been among them, and 16,384 GPUs take less than a second.

Layouts are compared by tokens a second that reach their expert: a layout that drops tokens would
otherwise look fast because it has less to do.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

from megatron_switch.errors import LayoutError
from megatron_switch.layout.sizes import FLAGS, Sizes
from megatron_switch.layout.validation import validate_layout
from megatron_switch.planner.cost.lower_bound import LowerBound
from megatron_switch.planner.layout_plan import LayoutPlan, best_plan, can_fit
from megatron_switch.planner.request import PlanRequest
from megatron_switch.utils.units import gigabytes

_MOST_NODES = 65536


@dataclass(frozen=True)
class BestPlans:
    """The best layouts, best first.

    Attributes:
        best: As many as were requested, or as fit.
        legal: Legal choices of sizes.
        evaluated: Of them, those whose bound did not rule them out.
    """

    best: tuple[LayoutPlan, ...]
    legal: int
    evaluated: int


def find_plans(request: PlanRequest, *, count: int = 5) -> BestPlans:
    """Return the layouts in which training is fastest.

    Args:
        request: Model, cluster, batch.
        count: How many to return; fewer where fewer fit.

    Raises:
        LayoutError: If no layout is legal, or none fits; the message says what would help.
    """
    bound = lower_bound(request)
    choices = sorted(
        (bound.seconds(sizes), index, sizes) for index, sizes in enumerate(request.legal_sizes())
    )
    if not choices:
        # Rules that the fixed sizes break by themselves say more than what excludes most.
        fixed = {name: size for name, size in request.fixed.items() if name in FLAGS}
        if request.fixed:
            validate_layout(Sizes(request.world_size).changed(**fixed), request.constraints)
        raise _no_legal_layout(request)
    best: list[LayoutPlan] = []
    evaluated = 0
    for seconds, _, sizes in choices:
        rate = bound.kept_tokens_per_second(seconds)
        if len(best) == count and rate <= best[-1].kept_tokens_per_second:
            break
        if seconds == math.inf:
            break
        evaluated += 1
        least = best[-1].kept_tokens_per_second if len(best) == count else 0.0
        found = best_plan(request, sizes, least=least, bound=bound)
        if found is not None:
            best = sorted([*best, found], key=lambda plan: -plan.kept_tokens_per_second)[:count]
    if not best:
        raise _fits_nowhere(request, len(choices))
    return BestPlans(tuple(best), len(choices), evaluated)


def lower_bound(request: PlanRequest) -> LowerBound:
    """Return the lower bounds of time and memory for a request."""
    return LowerBound(
        request.model,
        request.training,
        request.hardware,
        request.world_size,
        shard="fully_sharded" in request.shardings,
        offload=True in request.offloads,
    )


def _no_legal_layout(request: PlanRequest) -> LayoutError:
    excluded = Counter[str]()
    request.legal_sizes(excluded)
    rule, number = excluded.most_common(1)[0]
    return LayoutError(
        f"No layout of {request.world_size} GPUs is legal. The rule that excludes most, "
        f"{number / excluded.total():.0%} of the choices: {rule}. {_smallest_change(request)}"
    )


def _smallest_change(request: PlanRequest) -> str:
    """Return in words the nearest number of nodes, or batch, with which a layout is legal."""
    batch = request.training.global_batch_size
    for factor in range(1, 65):
        for other in (batch + factor, batch * factor, max(1, batch - factor)):
            training = replace(request.training, global_batch_size=other)
            if replace(request, training=training).legal_sizes():
                return f"With --global-batch-size {other} there are legal layouts."
    for step in range(1, request.nodes + 1):
        for nodes in (request.nodes - step, request.nodes + step):
            if nodes > 0 and replace(request, nodes=nodes).legal_sizes():
                return f"With --nodes {nodes} there are legal layouts."
    return "Change the model's sizes to multiples of the GPUs of a node."


def _fits_nowhere(request: PlanRequest, legal: int) -> LayoutError:
    enough = sufficient_nodes(request)
    budget = gigabytes(request.hardware.budget)
    answer = "No number of nodes up to 65,536 does with these settings."
    if enough is not None:
        ranks = enough * request.hardware.gpus_per_node
        answer = f"{ranks} GPUs (--nodes {enough}) would do."
    return LayoutError(
        f"The model fits in none of {legal} legal layouts of {request.world_size} GPUs: a GPU has "
        f"{budget} GB for tensors, and state is cut, recomputed or moved to the host as far as "
        f"it was allowed to. {answer} Otherwise take GPUs with more memory (--hardware), a smaller "
        "--seq-length, or fewer experts."
    )


def sufficient_nodes(request: PlanRequest) -> int | None:
    """Return the least doubling of the nodes on which some layout fits, None up to 65,536."""
    nodes = request.nodes
    while (nodes := nodes * 2) <= _MOST_NODES:
        ranks = nodes * request.hardware.gpus_per_node
        batch = max(request.training.global_batch_size, ranks)
        more = replace(
            request, nodes=nodes, training=replace(request.training, global_batch_size=batch)
        )
        bound = lower_bound(more)
        roomy = [
            one for one in more.legal_sizes() if bound.least_state(one) <= more.hardware.budget
        ]
        if any(can_fit(more, sizes) for sizes in roomy):
            return nodes
    return None
