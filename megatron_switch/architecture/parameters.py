"""Parameters of a Switch GPT: in all, active for one token, and on each rank.

Counted as Megatron-Core 0.19.2 and this project's layers allocate them, to the last number:

    attention          query, key and value projection, output projection, their biases where the
                       linear layers have one, and norms on queries and keys where asked for
    dense layer        two linear layers, the first twice as wide where it is gated
    sparse layer       a router and the experts; neither has a bias
    norms              before attention, before the MLP, and after the last layer
    embedding          padded vocabulary x width, and a learned table of positions if there is one
    head               as large as the embedding unless tied to it

The padded vocabulary is counted as it is stored. Multi-latent attention is not counted here.
Everything is a closed form over layers; no tensor is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters.

    Attributes:
        dense: All that every data-parallel rank holds a copy of: attention, norms, dense layers,
            routers, embedding, head.
        expert: In experts.
    """

    dense: int
    expert: int

    @property
    def total(self) -> int:
        """Dense and expert parameters together."""
        return self.dense + self.expert


def total_parameters(model: Architecture) -> ParameterCount:
    """Return the parameters of the whole model, each counted once."""
    return stage_parameters(model, Layout(1), 0)


@lru_cache(maxsize=256)
def active_parameters(model: Architecture) -> int:
    """Return the parameters that one token meets: all but the experts it is not sent to.

    Top-1 routing sends a token to one expert in each sparse layer. The embedding counts whole.
    """
    total = total_parameters(model)
    if not total.expert:
        return total.total
    return total.dense + total.expert // model.num_experts


def stage_parameters(
    model: Architecture,
    layout: Layout,
    stage: int,
    *,
    layers_of_stages: Sequence[Sequence[int]] | None = None,
) -> ParameterCount:
    """Return the parameters that each rank of a pipeline stage holds.

    Args:
        model: The model.
        layout: The ranks; every axis is taken to divide what it cuts.
        stage: Pipeline stage, from 0.
        layers_of_stages: The layers on each stage, counted from 0, where they are uneven; None
            spreads them evenly, over virtual stages too.

    Raises:
        LayoutError: If layers cannot be spread evenly, or are not all placed once.
    """
    if layers_of_stages is None:
        return _even_stage(model, layout, stage)
    depth = model.decoder.num_layers
    placed = sorted(layer for layers in layers_of_stages for layer in layers)
    if placed != list(range(depth)) or len(layers_of_stages) != layout.pp:
        raise LayoutError(
            f"Every one of {depth} layers stands on one of {layout.pp} stages, but the placement "
            f"is {[list(layers) for layers in layers_of_stages]}, counted from 0. Check "
            "--pipeline-model-parallel-size and the flags that place layers."
        )
    return _count(model, layout, stage, layers_of_stages[stage])


@lru_cache(maxsize=8192)
def _even_stage(model: Architecture, layout: Layout, stage: int) -> ParameterCount:
    """Count a stage of equally large ones; remembered, because a planner asks again and again."""
    return _count(model, layout, stage, even_stages(model.decoder.num_layers, layout)[stage])


def _count(
    model: Architecture, layout: Layout, stage: int, layers: Sequence[int]
) -> ParameterCount:
    sparse = set(layers) & set(model.decoder.sparse_layers)
    stacks = [Stack(len(layers), tuple(sparse))]
    is_first, is_last = stage == 0, stage == layout.pp - 1
    vocabulary = model.padded_vocab_size // layout.tp * model.hidden_size
    dense = 0
    if is_first:
        dense += vocabulary + model.learned_positions * model.hidden_size
    if is_last:
        dense += _norm(model, model.hidden_size)
        # A tied head on another stage than the embedding is a second copy of it.
        tied = model.share_embeddings_and_output_weights and is_first
        dense += 0 if tied else vocabulary
    if model.encoder is not None:
        dense += _beside_the_layers_of_a_t5(model, layout)
        stacks.append(model.encoder)
    for stack in stacks:
        dense += stack.num_layers * _attention_and_norms(model, layout.tp)
        dense += stack.num_dense * _dense_mlp(model, layout.tp)
        dense += len(stack.sparse_layers) * model.num_experts * model.hidden_size  # routers
    num_sparse = sum(len(stack.sparse_layers) for stack in stacks)
    return ParameterCount(dense, num_sparse * experts_of_layer(model, layout))


def _beside_the_layers_of_a_t5(model: Architecture, layout: Layout) -> int:
    """Return cross attention, relative positions and the encoder's last norm."""
    if layout.pp > 1:
        raise LayoutError(
            "Encoder and decoder of a T5 stand on one pipeline stage, but "
            f"--pipeline-model-parallel-size is {layout.pp}. Set it to 1."
        )
    norm = _norm(model, model.hidden_size)
    cross = model.decoder.num_layers * (_attention_and_norms(model, layout.tp) - norm)
    # The tables of both stacks are whole on every rank.
    positions = 2 * model.relative_attention_num_buckets * model.num_attention_heads
    return cross + norm + positions


def even_stages(num_layers: int, layout: Layout) -> list[list[int]]:
    """Return the layers on each stage, counted from 0, when all stages hold as many.

    With virtual stages the layers are dealt out in chunks: first chunk of every stage, then the
    second of every stage, and so on.

    Raises:
        LayoutError: If the layers are no multiple of the chunks.
    """
    chunks = layout.pp * layout.vp
    if num_layers % chunks:
        raise LayoutError(
            f"{num_layers} layers cannot be spread evenly over {layout.pp} stages x {layout.vp} "
            f"chunks = {chunks}. Change --num-layers or --pipeline-model-parallel-size."
        )
    size = num_layers // chunks
    return [
        [
            (chunk * layout.pp + stage) * size + place
            for chunk in range(layout.vp)
            for place in range(size)
        ]
        for stage in range(layout.pp)
    ]


def _attention_and_norms(model: Architecture, tp: int) -> int:
    """Return the parameters of a layer that are there whether it is dense or sparse."""
    queries = model.query_projection_size
    projected = queries + 2 * model.kv_projection_size
    count = (projected + queries) // tp * model.hidden_size
    if model.add_bias_linear or model.add_qkv_bias:
        count += projected // tp
    if model.add_bias_linear:
        count += model.hidden_size
    if model.qk_layernorm:
        count += 2 * _norm(model, model.kv_channels)
    return count + 2 * _norm(model, model.hidden_size)


def _dense_mlp(model: Architecture, tp: int) -> int:
    width = model.ffn_hidden_size // tp
    in_width = model.fc1_parts * width
    bias = in_width + model.hidden_size if model.add_bias_linear else 0
    return (in_width + width) * model.hidden_size + bias


def experts_of_layer(model: Architecture, layout: Layout) -> int:
    """Return the parameters of a sparse layer's experts on one rank."""
    width = model.moe_ffn_hidden_size // layout.etp
    return model.num_experts // layout.ep * (model.fc1_parts + 1) * width * model.hidden_size


def _norm(model: Architecture, width: int) -> int:
    return 2 * width if model.normalization == "LayerNorm" else width
