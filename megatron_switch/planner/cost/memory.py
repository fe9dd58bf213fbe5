"""Memory of one rank by part, in bytes: what is on the device at the peak of a step.

:func:`predict` describes what this project and Megatron-Core 0.19.2 keep, tensor by tensor, counted
as storages of live tensors. It leaves out what no formula of sizes can know: the CUDA context,
communicators and the allocator's fragmentation (the planner adds an allowance for them).

A peak is reached at the end of a forward pass: everything that backward needs is there, and on top
either the logits or the largest layer's own buffers, never both. So the total counts the larger;
or the optimizer's step is the peak, with its own needs and no activations.
"""

from dataclasses import dataclass

from megatron_switch.architecture.model import Architecture
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training
from megatron_switch.planner.cost.activations import extreme_stages, kept_by_layers
from megatron_switch.planner.cost.state import StateBytes, state_bytes


@dataclass(frozen=True)
class MemoryByPart:
    """Bytes on one device.

    Attributes:
        expert: Weights, gradients and optimizer state of experts.
        dense: The same of everything else.
        activations: What backward needs of attention, norms and feed-forward layers, rows and
            hidden rows of experts included, for all micro-batches under way.
        routing: Probabilities, indices and gates of routing and dispatch, for all of them too.
        buffers: Largest need of one layer while it works, beyond what it keeps.
        logits: Scores of the vocabulary and their gradient, on the last stage.
        step: What the optimizer's step needs beyond, when activations are gone.
        host: Optimizer state in the host's memory, for each rank; not in the total.
    """

    expert: StateBytes
    dense: StateBytes
    activations: int
    routing: int
    buffers: int
    logits: int
    step: int = 0
    host: int = 0

    @property
    def expert_state(self) -> int:
        """Bytes of all that belongs to the experts' parameters."""
        return self.expert.total

    @property
    def dense_state(self) -> int:
        """Bytes of all that belongs to the other parameters."""
        return self.dense.total

    @property
    def peaks_in_the_step(self) -> bool:
        """Whether the optimizer's step is the peak, and not the end of a forward pass."""
        return self.step > self._of_a_pass

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.expert_state + self.dense_state + max(self._of_a_pass, self.step)

    @property
    def _of_a_pass(self) -> int:
        return self.activations + self.routing + max(self.buffers, self.logits)

    def parts(self) -> dict[str, int]:
        """Return the parts by name, in the order in which they are shown."""
        return {
            "expert state": self.expert_state,
            "dense state": self.dense_state,
            "activations": self.activations,
            "routing": self.routing,
            "buffers": self.buffers,
            "logits": self.logits,
        }


def predict(
    model: Architecture, layout: Layout, training: Training, *, stage: int = 0
) -> MemoryByPart:
    """Return the memory of a rank of one pipeline stage at the peak of a step.

    Args:
        model: The model.
        layout: The ranks; every axis is taken to divide what it cuts.
        training: Batch, precision, dispatch and how state is kept.
        stage: Pipeline stage, from 0.

    Raises:
        LayoutError: If the layers cannot be spread evenly over the stages.
    """
    state = state_bytes(model, layout, training, stage=stage)
    kept = kept_by_layers(model, layout, training, stage=stage)
    # As a backward pass goes on, more is gathered and less is kept.
    done, steps = kept.activations + kept.routing, max(1, len(state.gathered) - 1)
    gathered = max((size - done * at // steps for at, size in enumerate(state.gathered)), default=0)
    return MemoryByPart(
        expert=state.expert,
        dense=state.dense,
        activations=kept.activations,
        routing=kept.routing,
        buffers=kept.buffers + gathered,
        logits=kept.logits,
        step=state.step,
        host=state.host,
    )


def predict_peak(
    model: Architecture, layout: Layout, training: Training
) -> tuple[int, MemoryByPart]:
    """Return the stage that needs most, and its memory."""
    stages = extreme_stages(model, layout.pp, layout.vp)
    by_stage = {stage: predict(model, layout, training, stage=stage) for stage in stages}
    worst = max(by_stage, key=lambda stage: by_stage[stage].total)
    return worst, by_stage[worst]
