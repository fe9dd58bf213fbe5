"""Time of a step: arithmetic, communication, bubble, optimizer; tokens a second and useful MFU.

A micro-batch takes its matrix products at the efficiency that the hardware file states, plus what
experts with few rows wait for their weights, plus its
communication; ``m`` micro-batches on ``p`` stages of ``v`` chunks take ``m + (p - 1) / v`` of them;
then gradients and weights travel and the optimizer reads and writes 30 bytes for each parameter it
owns. Nothing overlaps, except a fully sharded run's weights, which travel behind compute.

It is an estimate until links and one step were measured
(:mod:`megatron_switch.planner.hardware.link_fit`): kernels that are not matrix products, launches,
stragglers and imbalance between experts are not in it, and nor is what overlaps.

*Useful* operations are those of the model's mathematics: six for each parameter that a token is
multiplied with, and causal attention. Recomputation and empty slots are none, and nor is looking up
an embedding: of an untied pair of vocabulary matrices only the head counts.
"""

from dataclasses import dataclass

from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import active_parameters
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Slots, Training
from megatron_switch.planner.cost.activations import (
    StageLayers,
    extreme_stages,
    layers_of_stage,
    rows_of_experts,
)
from megatron_switch.planner.cost.drop_rate import balanced_drop_rate
from megatron_switch.planner.cost.expert_weights import seconds_of_weights
from megatron_switch.planner.cost.traffic import Traffic, Transfer
from megatron_switch.planner.hardware.cluster import Hardware

_OPTIMIZER_BYTES = 30
_HOST_READ_S = 30e-6
"""What packed dispatch waits for the host, in each sparse layer and pass. An assumption."""


@dataclass(frozen=True)
class Timing:
    """One step of one layout.

    Attributes:
        compute: Seconds of matrix products on one stage for all micro-batches.
        transfers: Communication, by kind.
        waits: Seconds in which packed dispatch waits for row counts.
        weights: Seconds in which experts with few rows wait for their weights.
        bubble: Idle share of the pipeline, as a part of its work.
        optimizer: Seconds of the optimizer.
        step: Seconds of the whole step.
        tokens_per_second: Tokens a second of one GPU.
        useful_mfu: Useful operations over the peak of the hardware.
    """

    compute: float
    transfers: tuple[Transfer, ...]
    waits: float
    weights: float
    bubble: float
    optimizer: float
    step: float
    tokens_per_second: float
    useful_mfu: float

    def seconds_of(self, name: str) -> float:
        """Return the time of one kind of communication, 0 where there is none."""
        return sum(transfer.seconds for transfer in self.transfers if transfer.name == name)

    @property
    def all_to_all_share(self) -> float:
        """Share of the step that all-to-alls take."""
        return self.seconds_of("all-to-all") * (1 + self.bubble) / self.step


def predict_step(
    model: Architecture, layout: Layout, training: Training, hardware: Hardware
) -> Timing:
    """Return the time of one step.

    Raises:
        LayoutError: If the layers cannot be spread evenly over the stages.
    """
    traffic = Traffic(model, layout, training, hardware)
    micro_batches = training.micro_batches(layout)
    compute = micro_batches * micro_batch_flops(model, layout, training) / hardware.flops
    often, once = traffic.per_micro_batch(), traffic.per_step()
    waits = weights = 0.0
    if model.num_experts:
        one = seconds_of_weights(model, layout, training, hardware)
        weights = traffic.sparse_layers * micro_batches * one
    if model.num_experts and training.dispatch == "packed":
        waits = traffic.sparse_layers * micro_batches * _HOST_READ_S
    bubble = (layout.pp - 1) / (layout.vp * micro_batches)
    busy = compute + waits + weights + sum(transfer.seconds for transfer in often)
    end = sum(transfer.seconds for transfer in once)
    if training.sharding == "fully_sharded":
        end = max(0.0, end - compute)
    count = traffic.parameters
    optimizer = _optimizer_seconds(count.dense, layout.dp * layout.cp, training, hardware)
    optimizer += _optimizer_seconds(count.expert, layout.edp, training, hardware)
    step = (busy * (1 + bubble) + end + optimizer) * hardware.step_factor
    tokens = micro_batches * training.micro_batch_size * layout.dp * training.seq_length
    rate = tokens / step / layout.world_size
    return Timing(
        compute=compute,
        transfers=(*often, *once),
        waits=waits,
        weights=weights,
        bubble=bubble,
        optimizer=optimizer,
        step=step,
        tokens_per_second=rate,
        useful_mfu=rate * useful_flops(model, training.seq_length) / (hardware.peak_tflops * 1e12),
    )


def useful_flops(model: Architecture, seq_length: int) -> float:
    """Return the operations of forward and backward that one token needs."""
    layers = model.decoder.num_layers
    if model.encoder is not None:
        layers += model.encoder.num_layers + model.decoder.num_layers
    looked_up = model.learned_positions * model.hidden_size
    if not model.share_embeddings_and_output_weights:
        looked_up += model.padded_vocab_size * model.hidden_size
    multiplied = active_parameters(model) - looked_up
    return 6.0 * multiplied + 6.0 * layers * model.query_projection_size * seq_length


def micro_batch_flops(model: Architecture, layout: Layout, training: Training) -> float:
    """Return the operations of one rank for one micro-batch, forward and backward, padding too.

    They are those of the stage with most to do. The head is spread over the stages, as if layers
    were placed to make up for it.
    """
    stages = {
        layers_of_stage(model, layout.pp, layout.vp, stage)
        for stage in extreme_stages(model, layout.pp, layout.vp)
    }
    return max(_stage_flops(model, layout, training, layers) for layers in stages)


def _stage_flops(
    model: Architecture, layout: Layout, training: Training, layers: StageLayers
) -> float:
    size, queries = model.hidden_size, model.query_projection_size
    halves = model.fc1_parts + 1
    whole = training.seq_length * training.micro_batch_size / (layout.tp * layout.cp)
    groups = model.num_query_groups
    attention = 2 * size * queries * (1 + groups / model.num_attention_heads)
    attention += queries * training.seq_length  # scores and context, half of them causal
    blocks, dense, sparse = layers.total, layers.dense, layers.sparse
    if model.encoder is not None:
        blocks += model.encoder.num_layers + model.decoder.num_layers
        sparse += len(model.encoder.sparse_layers)
        dense += model.encoder.num_dense
    dense_flops = 2 * whole * dense * halves * size * model.ffn_hidden_size
    other = 2 * whole * (blocks * attention + model.padded_vocab_size * size / layout.pp)
    routed = 0.0
    if model.num_experts:
        hidden = model.moe_ffn_hidden_size / layout.etp
        rows = rows_of_experts(model, layout, training)
        router = training.rank_tokens(layout) * size * model.num_experts
        routed = 2 * sparse * (halves * size * hidden * rows + router)
    if training.recompute == "full":
        return 4 * (dense_flops + other + routed)
    dense_times = 4 if training.recomputes("mlp") else 3
    routed_times = 4 if training.recomputes("moe") else 3
    return dense_times * dense_flops + 3 * other + routed_times * routed


def dropped_share(model: Architecture, layout: Layout, training: Training) -> float:
    """Return the share of tokens that a balanced router drops in a sparse layer."""
    if not model.num_experts:
        return 0.0
    slots = Slots.of(model.num_experts, layout, training)
    return balanced_drop_rate(slots.group_tokens, model.num_experts, slots.capacity)


def _optimizer_seconds(
    parameters: int, copies: int, training: Training, hardware: Hardware
) -> float:
    owned = parameters if training.sharding == "replicated" else parameters / copies
    if training.offload_optimizer:  # gradients down, weights up, and the host's own reads
        return owned * (_OPTIMIZER_BYTES + 4 + training.width) / (hardware.host_link_gb_s * 1e9)
    return owned * _OPTIMIZER_BYTES / (hardware.hbm_gb_s * 1e9)
