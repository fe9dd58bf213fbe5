"""Bytes that layers keep for backward on one rank, and what one of them needs while it works.

Counted tensor by tensor, as this project's layers and Megatron-Core 0.19.2 keep them, each storage
once. Per micro-batch, with T tokens of a rank (1/TP of them under sequence parallelism), U the same
without the cut over TP, w bytes an element, q and k the widths of all queries and all keys, F the
hidden width, G 2 for a gated activation and else 1, R rows that a rank's experts compute:

    a norm        its input and its output                                   2 T D w
    attention     query, key and value; with rotary positions rotated
                  queries and keys too; context and normalisers              U (2q + 2k) / TP w
    dense layer   before and after the activation                            U (G + 1) F / TP w
    experts       rows, and the input of the activation                      R (D + G F / ETP) w
    routing       probabilities, gates, indices                              4 T E + 8 (T + R) + ...

The activation of an expert is computed again in backward (see ``moe.feed_forward``); Transformer
Engine's experts keep its output as well. With padded dispatch R is every slot that a rank serves,
filled or not: ``E x ETP x groups x ceil(C / (TP x CP))``; with packed dispatch, the kept tokens
times ETP.

What a layer needs beyond is largest in the backward pass of its experts: the hidden activation,
its gradient and that of its input, float32 copies of the first two for the gradient of the gates,
and the gradient of one weight matrix. A CPU computes one expert after another, so there the hidden
tensors are those of one expert, and the gradients of all its matrices are there at the end.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import even_stages
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Slots, Training
from megatron_switch.planner.cost.drop_rate import balanced_drop_rate


@dataclass(frozen=True)
class Kept:
    """Bytes that a stage keeps for backward, and what its work needs beyond."""

    activations: int
    routing: int
    buffers: int
    logits: int


@dataclass(frozen=True)
class StageLayers:
    """How many layers of each kind a pipeline stage holds."""

    dense: int
    sparse: int

    @property
    def total(self) -> int:
        """All layers."""
        return self.dense + self.sparse


@lru_cache(maxsize=4096)
def layers_of_stage(model: Architecture, pp: int, vp: int, stage: int) -> StageLayers:
    """Return the layers on a stage, spread evenly.

    Raises:
        LayoutError: If the layers are no multiple of the chunks.
    """
    layers = even_stages(model.decoder.num_layers, Layout(pp, pp=pp, vp=vp))[stage]
    sparse = len(set(layers) & set(model.decoder.sparse_layers))
    return StageLayers(len(layers) - sparse, sparse)


@lru_cache(maxsize=4096)
def extreme_stages(model: Architecture, pp: int, vp: int) -> tuple[int, ...]:
    """Return the stages one of which needs most: first, last, and the one with most experts.

    Raises:
        LayoutError: If the layers are no multiple of the chunks.
    """
    sparse = [layers_of_stage(model, pp, vp, stage).sparse for stage in range(pp)]
    return tuple(sorted({0, pp - 1, sparse.index(max(sparse))}))


def rows_of_experts(model: Architecture, layout: Layout, training: Training) -> int:
    """Return the rows that the experts of a rank compute in one sparse layer and micro-batch."""
    slots = Slots.of(model.num_experts, layout, training)
    if training.dispatch == "padded":
        served = -(-max(1, slots.capacity) // (layout.tp * layout.cp))
        return model.num_experts * layout.etp * slots.num_groups * served
    kept = 1.0 - balanced_drop_rate(slots.group_tokens, model.num_experts, slots.capacity)
    return round(training.rank_tokens(layout) * kept) * layout.etp


def kept_by_layers(
    model: Architecture, layout: Layout, training: Training, *, stage: int = 0
) -> Kept:
    """Return what the layers of a stage keep, for all micro-batches under way.

    Args:
        model: The model.
        layout: The ranks.
        training: Batch, precision, dispatch, recompute.
        stage: Pipeline stage, from 0.

    Raises:
        LayoutError: If the layers cannot be spread evenly over the stages.
    """
    one = LayerBytes(model, layout, training)
    layers = layers_of_stage(model, layout.pp, layout.vp, stage)
    activations = layers.dense * one.dense + layers.sparse * one.sparse
    routing = layers.sparse * one.routing
    buffers = one.sparse_buffer if layers.sparse else one.dense_buffer
    if training.recompute == "full":
        # A chunk of layers is computed again in backward, when the logits are gone.
        again = one.sparse + one.routing if layers.sparse else one.dense
        buffers += again * training.recompute_layers
        activations = -(-layers.total // training.recompute_layers) * one.stream
        routing = 0
    if model.encoder is not None:
        activations += one.encoder(model.encoder)
        routing += len(model.encoder.sparse_layers) * one.routing
    chunks = chunks_under_way(layout, training, stage)
    activations = activations * chunks // layout.vp
    routing = routing * chunks // layout.vp
    if stage == 0:
        activations += one.embedding * -(-chunks // layout.vp)
        # A tied head's gradient waits for the embedding's.
        waits = model.share_embeddings_and_output_weights and layout.pp == 1
        buffers += one.vocabulary_gradient if waits else 0
    logits = one.logits if stage == layout.pp - 1 else 0
    return Kept(activations, routing, buffers, logits)


def chunks_under_way(layout: Layout, training: Training, stage: int) -> int:
    """Return how many model chunks' activations a stage holds at once, in Megatron's schedules."""
    micro_batches, behind = training.micro_batches(layout), layout.pp - stage - 1
    if layout.vp == 1:
        return min(micro_batches, behind + 1)
    return min(micro_batches * layout.vp, 2 * behind + (layout.vp - 1) * layout.pp + 1)


class LayerBytes:
    """Bytes for one micro-batch of one layer of each kind, on one rank."""

    def __init__(self, model: Architecture, layout: Layout, training: Training) -> None:
        """Compute all of them; see the module's text for the terms."""
        self._model, self._layout, self._training = model, layout, training
        width, size = training.width, model.hidden_size
        tokens = training.rank_tokens(layout)
        whole = training.seq_length * training.micro_batch_size // layout.cp
        self._tokens, self._whole = tokens, whole
        self.stream = tokens * size * width
        on_gpu = training.device == "cuda"
        mask = 0 if training.hidden_dropout == 0 else tokens * size * (1 if on_gpu else width)
        self._norm = self._norm_bytes(on_gpu)
        attention = self._attention_bytes(on_gpu) + self._norm + mask
        dense_hidden = whole * model.ffn_hidden_size // layout.tp * width
        halves = model.fc1_parts
        unfused = dense_hidden if model.gated_linear_unit and not training.fused_gate else 0
        feed_forward = dense_hidden * (halves + 1) + unfused
        if training.recomputes("mlp"):
            feed_forward = 0
        self.dense = attention + self._norm + feed_forward + mask
        self.dense_buffer = (
            dense_hidden * (2 * halves)
            + whole * size * width
            + self.stream
            + halves * size * (model.ffn_hidden_size // layout.tp) * width
        )
        if layout.tp > 1 and training.sequence_parallel:
            self.dense_buffer += whole * size * width  # what the linear layers gather into
        self.sparse = self.routing = 0
        self.sparse_buffer = self.dense_buffer
        if model.num_experts:
            self._set_sparse(attention, mask)
        self._set_ends(width)

    def _norm_bytes(self, on_gpu: bool) -> int:
        elements = self._tokens * self._model.hidden_size
        width = self._training.width
        if on_gpu or self._model.normalization == "LayerNorm":
            return elements * 2 * width
        return elements * (8 + width)  # torch's RMSNorm on the CPU works in float32, step by step

    def _attention_bytes(self, on_gpu: bool) -> int:
        model, layout, width = self._model, self._layout, self._training.width
        head = model.kv_channels
        queries = self._whole * model.query_projection_size // layout.tp * width
        groups = model.num_query_groups
        keys = queries * groups // model.num_attention_heads
        normalisers = self._whole * model.num_attention_heads // layout.tp * 4
        projected = queries + 2 * keys
        if self._training.rotary:
            projected += queries + keys
            projected += 4 * self._training.seq_length // layout.cp * head * width  # cosines, sines
        if groups != model.num_attention_heads and not on_gpu:  # keys and values are repeated
            projected = 3 * queries if self._training.rotary else 3 * queries + 2 * keys
        return projected + queries + normalisers

    def _set_sparse(self, attention: int, mask: int) -> None:
        model, layout, training = self._model, self._layout, self._training
        width, size = training.width, model.hidden_size
        rows = rows_of_experts(model, layout, training)
        hidden = model.moe_ffn_hidden_size // layout.etp
        halves = model.fc1_parts
        in_rows = rows * (size + halves * hidden) * width
        if training.transformer_engine and not training.recomputes("moe_act"):
            in_rows += rows * hidden * width
        shared = self._tokens
        if training.dispatch == "padded":
            shared *= layout.tp * layout.cp  # the index covers all tokens of the capacity groups
        routing = 4 * self._tokens * model.num_experts + 24 * self._tokens
        routing += 8 * (rows + shared * layout.etp) + 4 * rows
        if layout.ep * layout.etp > 1 and model.num_experts > layout.ep:
            routing += 16 * rows  # into the order of the experts, and back
        matrix = model.num_experts // layout.ep * size * hidden * width
        if training.transformer_engine:
            working = rows * (2 * size + (1 + halves) * hidden) * width
        else:
            extra = 2 * halves * width if model.gated_linear_unit else 0
            wide = 3 * width + (8 if width < 4 else 0)
            matrices, block = 1, rows
            if training.device == "cpu":  # one expert after another, each with its gradients
                most = rows_of_experts(model, layout, replace(training, dispatch="padded"))
                block = min(rows, -(-most * layout.ep // model.num_experts))
                matrices = halves + 1
            working = block * hidden * (wide + extra) + rows * size * width + matrices * matrix
        self.sparse_buffer = max(self.dense_buffer, working + self.stream)
        self.sparse, self.routing = attention + self._norm + in_rows + mask, routing
        if training.recomputes("moe"):
            self.sparse_buffer += in_rows + routing
            self.sparse, self.routing = self.sparse - in_rows, 0

    def _set_ends(self, width: int) -> None:
        model, layout, training = self._model, self._layout, self._training
        rows = model.padded_vocab_size // layout.tp
        scores = self._whole * rows
        self.vocabulary_gradient = rows * model.hidden_size * width
        forward = scores * (4 if width == 4 else 4 + width)
        backward = scores * width + self.vocabulary_gradient + self.stream
        if layout.tp > 1 and training.sequence_parallel:  # gathered input, and its gradient
            backward += 2 * self._whole * model.hidden_size * width
        self.logits = self._norm + max(forward, backward)
        mask = 0
        if training.hidden_dropout:
            mask = self.stream // width * (1 if training.device == "cuda" else width)
        stepwise = training.device == "cpu" and model.normalization == "RMSNorm"
        self.embedding = mask + (self.stream if stepwise else 0)

    def encoder(self, encoder: Stack) -> int:
        """Return what an encoder keeps, and the decoder's attention to it."""
        own = encoder.num_dense * self.dense + len(encoder.sparse_layers) * self.sparse
        cross = self._attention_bytes(self._training.device == "cuda") + self._norm
        return own + self._model.decoder.num_layers * cross
