"""Bytes of weights, gradients and optimizer state on one rank.

Adam below fp32 holds for each parameter a weight (2 bytes), a gradient summed in fp32 (4), an fp32
master and two fp32 moments (12). In fp32 there is no master: 4, 4 and 8. Of these

    replicated       every rank of the data-parallel group holds all:              2 + 4 + 12
    distributed      masters and moments are cut over the group:                   2 + 4 + 12 / D
    fully sharded    weights and gradients too, and a layer's are gathered while
                     it works:                                                (2 + 4 + 12) / D
                     (more for few stacked experts, see :func:`_owned_of_layer`)

with D the group over which copies exist: DP x CP for dense parameters, EDP for experts. In total an
expert's state takes ``6 P_e / M + 12 P_e / N`` bytes a rank with M = EP x ETP x PP and N ranks.
"""

from dataclasses import dataclass

from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import (
    ParameterCount,
    experts_of_layer,
    stage_parameters,
)
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training

_LEAST_UNIT = 10**9
"""Parameters that Megatron-FSDP gathers and sums at a time, at least."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes that belong to parameters on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class RankState:
    """State of one rank.

    Attributes:
        expert: Of the experts.
        dense: Of everything else.
        gathered: Whole weights and gradients where they are cut otherwise, from the beginning of a
            backward pass to its end; empty where they are not.
        step: What the optimizer allocates during its step.
        host: Optimizer state in the host's memory.
    """

    expert: StateBytes
    dense: StateBytes
    gathered: tuple[int, ...]
    step: int
    host: int


def state_bytes(
    model: Architecture, layout: Layout, training: Training, *, stage: int = 0
) -> RankState:
    """Return the state of a rank of one pipeline stage.

    Raises:
        LayoutError: If the layers cannot be spread evenly over the stages.
    """
    count = stage_parameters(model, layout, stage)
    owned = None
    if training.sharding == "fully_sharded" and count.expert:
        owned = count.expert // experts_of_layer(model, layout)
        owned *= _owned_of_layer(model, layout, training)
    expert, expert_host = _of(count.expert, layout.edp, training, owned)
    dense, dense_host = _of(count.dense, layout.dp * layout.cp, training)
    return RankState(
        expert,
        dense,
        gathered=_gathered(count, model, layout, training),
        step=_step(count, model, layout, training),
        host=expert_host + dense_host,
    )


def _of(
    parameters: int, copies: int, training: Training, owned: int | None = None
) -> tuple[StateBytes, int]:
    """Return bytes on the device and on the host; ``owned`` parameters where they are cut."""
    if owned is None:
        owned = parameters if training.sharding == "replicated" else -(-parameters // copies)
    held = owned if training.sharding == "fully_sharded" else parameters
    weights = held * training.width
    gradients = held * (4 if training.fp32_gradients else training.width)
    optimizer = owned * (12 if training.width == 2 else 8)
    if training.offload_optimizer:
        # The host's copy of the gradients comes on top.
        return StateBytes(weights, gradients, 0), optimizer + optimizer // 3
    return StateBytes(weights, gradients, optimizer), 0


def _owned_of_layer(model: Architecture, layout: Layout, training: Training) -> int:
    """Return how many of them Megatron-FSDP gives to one of their copies.

    It cuts a tensor between entries of its first axis only. Experts of plain torch modules are
    stacked along it, so that no matrix of an expert is cut, and some copies may own none.
    """
    whole = experts_of_layer(model, layout)
    if training.transformer_engine:
        return -(-whole // layout.edp)
    width = model.moe_ffn_hidden_size // layout.etp
    matrix = model.fc1_parts * model.hidden_size * width
    pieces = -(-whole // matrix)
    return -(-pieces // layout.edp) * matrix


def _gathered(
    count: ParameterCount, model: Architecture, layout: Layout, training: Training
) -> tuple[int, ...]:
    """Return bytes of whole weights and gradients as a backward pass goes through the layers.

    A block is a sparse layer with the dense ones up to the next. Megatron-FSDP gathers the block at
    work and as much ahead as half of its unit holds: the parameters of two layers, and no fewer
    than 10^9. Gradients stay whole until they are summed: of the experts at work, and of the block
    before where a unit holds it. Embeddings are gathered all the time.
    """
    if training.sharding != "fully_sharded":
        return ()
    layers = model.decoder.num_layers // layout.pp
    blocks = max(1, len(model.decoder.sparse_layers) // layout.pp)
    ends = model.padded_vocab_size // layout.tp * model.hidden_size * model.vocabulary_matrices
    experts = 0
    if count.expert:
        experts = _owned_of_layer(model, layout, training) * layout.edp
    else:
        blocks = layers
    block = experts + max(0, count.dense - ends) // blocks
    unit = max(_LEAST_UNIT, 2 * (count.expert + max(0, count.dense - ends)) // layers)
    ahead, wait = -(-(unit // 2) // block), min(1, unit // block)
    gradient = 4 if training.fp32_gradients else training.width
    phases = [
        (ends + min(blocks - done, 1 + ahead) * block) * training.width
        + (min(done, wait) * block + experts) * gradient
        for done in range(blocks)
    ]
    return (*phases, ends * (training.width + gradient) + min(blocks, wait) * block * gradient)


def _step(count: ParameterCount, model: Architecture, layout: Layout, training: Training) -> int:
    """Return the bytes that Adam allocates while it works.

    Transformer Engine's (and Apex's) fused kernel needs none. torch's holds the roots of all second
    moments at once on a GPU, and three tensors of the largest parameter on the CPU.
    """
    if training.transformer_engine or training.offload_optimizer:
        return 0
    replicated = training.sharding == "replicated"
    copies = (1, 1) if replicated else (layout.edp, layout.dp * layout.cp)
    if training.device == "cuda":
        return 4 * (-(-count.expert // copies[0]) + -(-count.dense // copies[1]))
    hidden = model.moe_ffn_hidden_size // layout.etp
    halves = model.fc1_parts
    expert = model.num_experts // layout.ep * model.hidden_size * hidden * halves
    vocabulary = model.padded_vocab_size // layout.tp * model.hidden_size
    dense = halves * model.hidden_size * (model.ffn_hidden_size // layout.tp)
    owned_expert = expert if count.expert else 0
    return 12 * max(-(-owned_expert // copies[0]), -(-max(vocabulary, dense) // copies[1]))
