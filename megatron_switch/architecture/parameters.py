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
from typing import Literal

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    """What decides how many parameters a Switch GPT has.

    Attributes:
        num_layers: Layers, dense and sparse.
        hidden_size: Width of the residual stream.
        num_attention_heads: Query heads.
        num_query_groups: Key-value heads; None as many as query heads.
        kv_channels: Width of a head; None hidden_size / num_attention_heads.
        ffn_hidden_size: Hidden width of a dense layer.
        moe_ffn_hidden_size: Hidden width of an expert; None that of a dense layer.
        num_experts: Experts of a sparse layer.
        sparse_layers: Numbers of the layers with experts, the first layer being 1.
        padded_vocab_size: Rows of the embedding.
        tied_head: Whether the head is the embedding.
        learned_positions: Rows of the learned position table; 0 for rotary or no positions.
        gated: Whether feed-forward layers are gated (SwiGLU, GEGLU).
        linear_bias: Whether linear layers of attention and dense layers have a bias.
        qkv_bias: Whether the projection to query, key and value has one in any case.
        norm: LayerNorm has a weight and a bias, RMSNorm a weight.
        qk_norm: Whether queries and keys are normalised.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    padded_vocab_size: int
    num_query_groups: int | None = None
    kv_channels: int | None = None
    moe_ffn_hidden_size: int | None = None
    num_experts: int = 0
    sparse_layers: tuple[int, ...] = ()
    tied_head: bool = True
    learned_positions: int = 0
    gated: bool = False
    linear_bias: bool = False
    qkv_bias: bool = False
    norm: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    qk_norm: bool = False


@dataclass(frozen=True, kw_only=True)
class T5Shape(GPTShape):
    """The same for a Switch T5; what is not named here is that of both stacks.

    ``num_layers`` and ``sparse_layers`` are the decoder's. Linear layers have no bias, norms are
    RMSNorm, and positions are relative: one table of biases a stack.

    Attributes:
        encoder_layers: Layers of the encoder.
        encoder_sparse_layers: Numbers of those with experts, the first layer being 1.
        relative_buckets: Rows of a stack's table of position biases.
    """

    encoder_layers: int
    encoder_sparse_layers: tuple[int, ...] = ()
    relative_buckets: int = 32
    norm: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"


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


def total_parameters(shape: GPTShape) -> ParameterCount:
    """Return the parameters of the whole model, each counted once."""
    return stage_parameters(shape, Layout(1), 0)


@lru_cache(maxsize=256)
def active_parameters(shape: GPTShape) -> int:
    """Return the parameters that one token meets: all but the experts it is not sent to.

    Top-1 routing sends a token to one expert in each sparse layer. The embedding counts whole.
    """
    total = total_parameters(shape)
    if not total.expert:
        return total.total
    return total.dense + total.expert // shape.num_experts


def stage_parameters(
    shape: GPTShape,
    layout: Layout,
    stage: int,
    *,
    layers_of_stages: Sequence[Sequence[int]] | None = None,
) -> ParameterCount:
    """Return the parameters that each rank of a pipeline stage holds.

    Args:
        shape: The model.
        layout: The ranks; every axis is taken to divide what it cuts.
        stage: Pipeline stage, from 0.
        layers_of_stages: Numbers, from 1, of the layers on each stage, where they are uneven;
            None spreads them evenly, over virtual stages too.

    Raises:
        LayoutError: If layers cannot be spread evenly, or are not all placed once.
    """
    if layers_of_stages is None:
        return _even_stage(shape, layout, stage)
    placed = sorted(layer for layers in layers_of_stages for layer in layers)
    if placed != list(range(1, shape.num_layers + 1)) or len(layers_of_stages) != layout.pp:
        raise LayoutError(
            f"Every one of {shape.num_layers} layers stands on one of {layout.pp} stages, but the "
            f"placement is {[list(layers) for layers in layers_of_stages]}. Check "
            "--pipeline-model-parallel-size and the flags that place layers."
        )
    return _count(shape, layout, stage, layers_of_stages[stage])


@lru_cache(maxsize=8192)
def _even_stage(shape: GPTShape, layout: Layout, stage: int) -> ParameterCount:
    """Count a stage of equally large ones; remembered, because a planner asks again and again."""
    return _count(shape, layout, stage, even_stages(shape.num_layers, layout)[stage])


def _count(shape: GPTShape, layout: Layout, stage: int, layers: Sequence[int]) -> ParameterCount:
    num_sparse = len(set(layers) & set(shape.sparse_layers))
    dense = len(layers) * _attention_and_norms(shape, layout.tp)
    dense += (len(layers) - num_sparse) * _dense_mlp(shape, layout.tp)
    dense += num_sparse * shape.num_experts * shape.hidden_size  # routers
    vocabulary = shape.padded_vocab_size // layout.tp * shape.hidden_size
    is_first, is_last = stage == 0, stage == layout.pp - 1
    if is_first:
        dense += vocabulary + shape.learned_positions * shape.hidden_size
    if is_last:
        dense += _norm(shape, shape.hidden_size)
        # A tied head on another stage than the embedding is a second copy of it.
        dense += 0 if shape.tied_head and is_first else vocabulary
    if isinstance(shape, T5Shape):
        dense += _encoder_and_cross_attention(shape, layout)
        num_sparse += len(shape.encoder_sparse_layers)
    return ParameterCount(dense, num_sparse * _experts(shape, layout))


def _encoder_and_cross_attention(shape: T5Shape, layout: Layout) -> int:
    """Return the dense parameters that a T5 has on top of a GPT of its decoder's layers."""
    if layout.pp > 1:
        raise LayoutError(
            "Encoder and decoder of a T5 stand on one pipeline stage, but "
            f"--pipeline-model-parallel-size is {layout.pp}. Set it to 1."
        )
    num_sparse = len(shape.encoder_sparse_layers)
    layers = shape.encoder_layers * _attention_and_norms(shape, layout.tp)
    layers += (shape.encoder_layers - num_sparse) * _dense_mlp(shape, layout.tp)
    routers = num_sparse * shape.num_experts * shape.hidden_size
    norm = _norm(shape, shape.hidden_size)
    cross = shape.num_layers * (_attention_and_norms(shape, layout.tp) - norm)
    positions = 2 * shape.relative_buckets * shape.num_attention_heads  # whole on every rank
    return layers + routers + cross + norm + positions


def even_stages(num_layers: int, layout: Layout) -> list[list[int]]:
    """Return the numbers, from 1, of the layers on each stage when all stages hold as many.

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
            1 + (chunk * layout.pp + stage) * size + place
            for chunk in range(layout.vp)
            for place in range(size)
        ]
        for stage in range(layout.pp)
    ]


def _attention_and_norms(shape: GPTShape, tp: int) -> int:
    """Return the parameters of a layer that are there whether it is dense or sparse."""
    head = shape.kv_channels or shape.hidden_size // shape.num_attention_heads
    queries = head * shape.num_attention_heads
    projected = queries + 2 * head * (shape.num_query_groups or shape.num_attention_heads)
    count = (projected + queries) // tp * shape.hidden_size
    if shape.linear_bias or shape.qkv_bias:
        count += projected // tp
    if shape.linear_bias:
        count += shape.hidden_size
    if shape.qk_norm:
        count += 2 * _norm(shape, head)
    return count + 2 * _norm(shape, shape.hidden_size)


def _dense_mlp(shape: GPTShape, tp: int) -> int:
    width = shape.ffn_hidden_size // tp
    in_width = 2 * width if shape.gated else width
    bias = in_width + shape.hidden_size if shape.linear_bias else 0
    return (in_width + width) * shape.hidden_size + bias


def _experts(shape: GPTShape, layout: Layout) -> int:
    """Return the parameters of a sparse layer's experts on one rank."""
    width = (shape.moe_ffn_hidden_size or shape.ffn_hidden_size) // layout.etp
    in_width = 2 * width if shape.gated else width
    return shape.num_experts // layout.ep * (in_width + width) * shape.hidden_size


def _norm(shape: GPTShape, width: int) -> int:
    return 2 * width if shape.norm == "LayerNorm" else width
