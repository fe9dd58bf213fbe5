"""Bytes of weights, gradients and optimizer state on one rank.

Adam below fp32 holds for each parameter a weight (2 bytes), a gradient summed in fp32 (4), an fp32
master and two fp32 moments (12). In fp32 there is no master: 4, 4 and 8. Of these

    replicated       every rank of the data-parallel group holds all:              2 + 4 + 12
    distributed      masters and moments are cut over the group:                   2 + 4 + 12 / D
    fully sharded    weights and gradients too, and a layer's are gathered while
                     it works:                                                (2 + 4 + 12) / D

with D the group over which copies exist: DP x CP for dense parameters, EDP for experts. In total an
expert's state takes ``6 P_e / M + 12 P_e / N`` bytes a rank with M = EP x ETP x PP and N ranks.
"""

from dataclasses import dataclass

from megatron_switch.layout.grid import Layout
from megatron_switch.layout.model_size import GPTShape, ParameterCount, stage_parameters
from megatron_switch.layout.training import Training


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
        gathered: Whole weights and gradients of the layers at work, where they are cut otherwise.
        step: What the optimizer allocates during its step.
        host: Optimizer state in the host's memory.
    """

    expert: StateBytes
    dense: StateBytes
    gathered: int
    step: int
    host: int


def state_bytes(
    model: GPTShape, layout: Layout, training: Training, *, stage: int = 0
) -> RankState:
    """Return the state of a rank of one pipeline stage.

    Raises:
        LayoutError: If the layers cannot be spread evenly over the stages.
    """
    count = stage_parameters(model, layout, stage)
    expert, expert_host = _of(count.expert, layout.edp, training)
    dense, dense_host = _of(count.dense, layout.dp * layout.cp, training)
    return RankState(
        expert,
        dense,
        gathered=_gathered(count, model, layout, training),
        step=_step(count, model, layout, training),
        host=expert_host + dense_host,
    )


def _of(parameters: int, copies: int, training: Training) -> tuple[StateBytes, int]:
    half = training.width == 2
    gradient = 4 if training.fp32_gradients else training.width
    weights, gradients = parameters * training.width, parameters * gradient
    optimizer = parameters * (12 if half else 8)
    if training.sharding != "replicated":
        optimizer = -(-optimizer // copies)
    if training.sharding == "fully_sharded":
        weights, gradients = -(-weights // copies), -(-gradients // copies)
    if training.offload_optimizer:
        # The host's copy of the gradients comes on top.
        return StateBytes(weights, gradients, 0), optimizer + optimizer // 3
    return StateBytes(weights, gradients, optimizer), 0


def _gathered(count: ParameterCount, model: GPTShape, layout: Layout, training: Training) -> int:
    if training.sharding != "fully_sharded":
        return 0
    layers = max(1, model.num_layers // layout.pp)
    sparse = max(1, len(model.sparse_layers) // layout.pp)
    largest = count.expert // sparse + count.dense // layers
    # One layer at work and the next on its way, and the gradient of one.
    return largest * (2 * training.width + (4 if training.fp32_gradients else training.width))


def _step(count: ParameterCount, model: GPTShape, layout: Layout, training: Training) -> int:
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
    hidden = (model.moe_ffn_hidden_size or model.ffn_hidden_size) // layout.etp
    halves = 2 if model.gated else 1
    expert = model.num_experts // layout.ep * model.hidden_size * hidden * halves
    vocabulary = model.padded_vocab_size // layout.tp * model.hidden_size
    dense = halves * model.hidden_size * (model.ffn_hidden_size // layout.tp)
    owned_expert = expert if count.expert else 0
    return 12 * max(-(-owned_expert // copies[0]), -(-max(vocabulary, dense) // copies[1]))
