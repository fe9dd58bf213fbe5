"""Ways to save memory at the cost of time: where state is kept, and what is computed twice."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Recompute, Sharding, Training
from megatron_switch.planner.request import PlanRequest


@dataclass(frozen=True)
class MemorySaving:
    """One way to save memory.

    Attributes:
        sharding: Where optimizer state, gradients and weights are cut.
        offload: Whether the optimizer is on the host.
        recompute: Layers that are computed again in backward: ``none``, the sparse ones (``moe``)
            or all (``full``).
    """

    sharding: Sharding
    offload: bool
    recompute: Literal["none", "moe", "full"]

    def applied_to(self, training: Training) -> Training:
        """Return ``training`` with this saving."""
        granularity: Recompute = "selective" if self.recompute == "moe" else self.recompute
        return replace(
            training,
            sharding=self.sharding,
            offload_optimizer=self.offload,
            recompute=granularity,
            recompute_modules=("moe",) if self.recompute == "moe" else (),
        )

    def is_possible(self, request: PlanRequest, layout: Layout) -> bool:
        """Return whether a layout can have this saving, and the request allows it."""
        if self.sharding == "fully_sharded" and layout.pp > 1:
            return False  # Megatron-FSDP's mesh of ranks has no axis for stages
        if self.recompute == "moe" and not request.model.num_experts:
            return False
        return self.sharding in request.shardings and self.offload in request.offloads


def _by_recompute(sharding: Sharding, offload: bool) -> tuple[MemorySaving, ...]:
    return (
        MemorySaving(sharding, offload, "none"),
        MemorySaving(sharding, offload, "moe"),
        MemorySaving(sharding, offload, "full"),
    )


SAVINGS: tuple[tuple[MemorySaving, ...], ...] = (
    _by_recompute("distributed", False),
    _by_recompute("fully_sharded", False),
    _by_recompute("distributed", True),
)
"""All of them: a row for each place of the state, in which each entry costs more time than the one
before, and needs less memory."""

NO_SAVING = SAVINGS[0][0]
"""The fastest: the distributed optimizer, on the GPU, and nothing computed twice."""
