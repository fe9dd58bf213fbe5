"""What is planned: a model and a batch on a cluster, and what is decided already."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_switch.architecture.model import Architecture
from megatron_switch.layout.model_rules import LayoutConstraints
from megatron_switch.layout.sizes import Sizes
from megatron_switch.layout.workload import Dispatch, Sharding, Training
from megatron_switch.planner.hardware.cluster import Hardware
from megatron_switch.planner.legal_sizes import legal_sizes


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is planned.

    Attributes:
        model: The model.
        training: Batch and capacity; dispatch, micro-batch and savings are chosen.
        hardware: A node of the cluster, and its links.
        nodes: Nodes.
        dispatches: Dispatch modes to consider.
        shardings: Ways of keeping optimizer state to consider.
        offloads: Whether the optimizer may be on the host.
        fixed: Sizes that are decided already: ``tp``, ``pp``, ``cp``, ``ep``, ``etp``, ``vp``, and
            ``micro_batch_size``.
        train_tokens: Tokens of the whole training, for its time; None where that is not known.
    """

    model: Architecture
    training: Training
    hardware: Hardware
    nodes: int
    dispatches: tuple[Dispatch, ...] = ("padded", "packed")
    shardings: tuple[Sharding, ...] = ("distributed", "fully_sharded")
    offloads: tuple[bool, ...] = (False, True)
    fixed: Mapping[str, int] = field(default_factory=dict)
    train_tokens: int | None = None

    @property
    def world_size(self) -> int:
        """GPUs in all."""
        return self.nodes * self.hardware.gpus_per_node

    @cached_property
    def constraints(self) -> LayoutConstraints:
        """What sizes have to divide."""
        training, own = self.training, self.model.constraints
        return replace(
            own,
            seq_length=training.seq_length,
            sequence_parallel=True,
            micro_batch_size=self.fixed.get("micro_batch_size", 1),
            global_batch_size=training.global_batch_size,
            capacity_group=training.capacity.group,
            whole_sequences=own.whole_sequences or not training.transformer_engine,
        )

    def legal_sizes(self, excluded: Counter[str] | None = None) -> list[Sizes]:
        """Return the legal choices of sizes that have the fixed ones."""
        return legal_sizes(self.world_size, self.constraints, fixed=self.fixed, excluded=excluded)
