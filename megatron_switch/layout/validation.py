"""Check a layout against the model and batch that it has to divide, before any group exists.

:func:`validate_layout` is the one entry point. It takes plain values, touches no process group
and no GPU, and returns the :class:`~megatron_switch.layout.grid.Layout` or raises a
:class:`~megatron_switch.errors.LayoutError` that shows every broken rule with its values and way
out, both grids, and the nearest settings that all rules accept. A value that is not given is not
checked.

The rules are those of Megatron-Core 0.19.2 (``training/arguments.py``, ``TransformerConfig``,
its schedules), collected where a user can still act on them, plus one of ours: the padded
vocabulary is divisible by TP without growing, so that it does not depend on the layout.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_switch.errors import LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import (
    FLAGS,
    BrokenRule,
    Sizes,
    broken_grid_rule,
    layout_error,
)

_CHUNK_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the layout has to divide; None leaves a value, and its rules, out.

    Attributes:
        num_experts: Experts of an MoE layer; None for a dense model.
        num_layers: Layers to spread evenly over the stages; None where stages are uneven.
        num_attention_heads: Query heads.
        num_query_groups: Key-value heads; None as many as query heads.
        ffn_hidden_size: Hidden width of a dense feed-forward layer.
        moe_ffn_hidden_size: Hidden width of an expert.
        add_bias_linear: Whether linear layers, experts included, have a bias.
        padded_vocab_size: Rows of the embedding.
        seq_length: Tokens of a sequence.
        sequence_parallel: Whether --sequence-parallel is on.
        micro_batch_size: Sequences of one micro-batch on one data-parallel rank.
        global_batch_size: Sequences of one optimizer step over all ranks.
        chunk_group: Micro-batches that a virtual pipeline chunk takes at a time; None for PP.
        overlap_p2p: Whether pipeline communication overlaps (it does by default).
        capacity_group: --switch-capacity-group.
    """

    num_experts: int | None = None
    num_layers: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    moe_ffn_hidden_size: int | None = None
    add_bias_linear: bool = False
    padded_vocab_size: int | None = None
    seq_length: int | None = None
    sequence_parallel: bool = False
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    chunk_group: int | None = None
    overlap_p2p: bool = True
    capacity_group: str = "microbatch"


def validate_layout(sizes: Sizes, shape: ModelShape) -> Layout:
    """Return the layout of ``sizes`` if it fits ``shape``.

    Args:
        sizes: Parallel sizes as given on the command line.
        shape: What they have to divide.

    Raises:
        LayoutError: If a rule is broken; every one is explained.
    """
    broken = _broken_rules(sizes, shape)
    if broken:
        is_legal, also = _suggestions(sizes, shape)
        raise layout_error(broken, sizes, is_legal, also=also)
    return Layout.of(sizes)


def virtual_stages(num_layers: int, pp: int, layers_per_chunk: int) -> int:
    """Return the chunks per pipeline stage for Megatron's ``--num-layers-per-virtual-...`` flag.

    Args:
        num_layers: Layers of the model.
        pp: Pipeline stages.
        layers_per_chunk: ``--num-layers-per-virtual-pipeline-stage``.

    Raises:
        LayoutError: If the layers are no multiple of stages x layers of a chunk.
    """
    step = pp * layers_per_chunk
    if layers_per_chunk < 1 or num_layers % step:
        allowed = _divisors(num_layers // pp) if num_layers % pp == 0 else "none"
        raise LayoutError(
            "Layers must be a multiple of PP x layers of a chunk, but --num-layers is "
            f"{num_layers}, {FLAGS['pp']} {pp} and --num-layers-per-virtual-pipeline-stage "
            f"{layers_per_chunk}. Chunks of this many layers would work: {allowed}."
        )
    return num_layers // step


def _broken_rules(sizes: Sizes, shape: ModelShape) -> list[BrokenRule]:
    no_grid = broken_grid_rule(sizes)
    if no_grid:  # the model's rules are about DP and EDP too, which do not exist then
        return [no_grid]
    return [broken for rule in _RULES if (broken := rule(sizes, shape)) is not None]


def _suggestions(
    asked: Sizes, shape: ModelShape
) -> tuple[Callable[[Sizes], bool], Callable[[Sizes], str]]:
    """Return which other sizes may be suggested, and with what flag besides.

    More context parallelism than was asked for never is: only some attention has it. Sequence
    parallelism goes with another TP, unless its lack is all that is wrong.
    """
    with_flag = replace(shape, sequence_parallel=True)
    may_add = not shape.sequence_parallel and bool(_broken_rules(asked, with_flag))

    def needs_flag(other: Sizes) -> bool:
        return may_add and shape.num_experts is not None and other.tp > 1

    def is_legal(other: Sizes) -> bool:
        tried = with_flag if needs_flag(other) else shape
        return other.cp <= asked.cp and not _broken_rules(other, tried)

    return is_legal, lambda other: "--sequence-parallel" if needs_flag(other) else ""


def _experts_over_ep(sizes: Sizes, shape: ModelShape) -> BrokenRule | None:
    if shape.num_experts is None and sizes.ep > 1:
        return BrokenRule(
            f"{FLAGS['ep']} {sizes.ep} spreads experts over ranks, but the model has none.",
            "Set --num-experts.",
        )
    if shape.num_experts is None or shape.num_experts % sizes.ep == 0:
        return None
    allowed = _divisors(shape.num_experts)
    return BrokenRule(
        f"{shape.num_experts} experts cannot be shared evenly by {sizes.ep} expert-parallel ranks "
        f"({shape.num_experts % sizes.ep} would be left over).",
        f"{FLAGS['ep']} must be one of {allowed}, or change --num-experts.",
    )


def _experts_over_etp(sizes: Sizes, shape: ModelShape) -> BrokenRule | None:
    if shape.num_experts is None or sizes.etp == 1:
        return None
    source = f"which is {FLAGS['tp']} unless given" if sizes.etp_follows_tp else "as given"
    if shape.add_bias_linear:
        return BrokenRule(
            f"Experts with a bias cannot be cut over ranks, but {FLAGS['etp']} is {sizes.etp} "
            f"({source}).",
            f"Add --disable-bias-linear, or set {FLAGS['etp']} 1.",
        )
    width = shape.moe_ffn_hidden_size
    if width is None or width % sizes.etp == 0:
        return None
    return BrokenRule(
        f"An expert's hidden width must be a multiple of ETP, but --moe-ffn-hidden-size is {width} "
        f"and {FLAGS['etp']} is {sizes.etp} ({source}).",
        f"Use a width that is a multiple of {sizes.etp}, or set {FLAGS['etp']} 1.",
    )


def _experts_need_sequence_parallel(sizes: Sizes, shape: ModelShape) -> BrokenRule | None:
    if shape.num_experts is None or sizes.tp == 1 or shape.sequence_parallel:
        return None
    return BrokenRule(
        f"With experts and {FLAGS['tp']} {sizes.tp} (above 1), sequence parallelism is required: "
        f"without it each of the {sizes.tp} tensor-parallel ranks would route the same tokens.",
        "Add --sequence-parallel.",
    )


def _heads_over_tp(sizes: Sizes, shape: ModelShape) -> BrokenRule | None:
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if heads is not None and heads % sizes.tp:
        return BrokenRule(
            f"Attention heads must be a multiple of TP, but --num-attention-heads is {heads} and "
            f"{FLAGS['tp']} is {sizes.tp}.",
            f"Use one of {_divisors(heads)} as {FLAGS['tp']}, or change --num-attention-heads.",
        )
    if groups is not None and groups % sizes.tp and sizes.tp % groups:
        return BrokenRule(
            f"Query groups must be a multiple or a divisor of TP, but --num-query-groups is "
            f"{groups} and {FLAGS['tp']} is {sizes.tp}.",
            f"Use one of {_divisors(groups)} as {FLAGS['tp']}, or change --num-query-groups.",
        )
    return None


def _width_over_tp(sizes: Sizes, shape: ModelShape) -> BrokenRule | None:
    width = shape.ffn_hidden_size
    if width is None or width % sizes.tp == 0:
        return None
    return BrokenRule(
        f"The feed-forward width must be a multiple of TP, but --ffn-hidden-size is {width} and "
        f"{FLAGS['tp']} is {sizes.tp}.",
        f"Use a width that is a multiple of {sizes.tp}.",
    )


def _vocabulary_over_tp(sizes: Sizes, shape: ModelShape) -> BrokenRule | None:
    rows = shape.padded_vocab_size
    if rows is None or rows % sizes.tp == 0:
        return None
    return BrokenRule(
        f"The padded vocabulary must be a multiple of TP, but it has {rows} rows and "
        f"{FLAGS['tp']} is {sizes.tp}.",
        f"Set --make-vocab-size-divisible-by to a multiple of {sizes.tp}; this changes the model, "
        "and checkpoints of the other size no longer fit.",
    )


def _layers_over_stages(sizes: Sizes, shape: ModelShape) -> BrokenRule | None:
    chunks = sizes.pp * sizes.vp
    if sizes.vp > 1 and sizes.pp == 2 and not shape.overlap_p2p:
        return BrokenRule(
            "Virtual pipeline chunks without overlap of pipeline communication need more than two "
            f"stages, but {FLAGS['pp']} is 2 with --no-overlap-p2p-communication.",
            "Leave --no-overlap-p2p-communication away.",
        )
    if shape.num_layers is None or shape.num_layers % chunks == 0:
        return None
    return BrokenRule(
        f"Layers must be a multiple of PP x VP, but --num-layers is {shape.num_layers} and there "
        f"are {sizes.pp} stages x {sizes.vp} chunks = {chunks}.",
        f"Set --num-layers to {_around(shape.num_layers, chunks)}, or place layers unevenly "
        "(--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers, "
        "--pipeline-model-parallel-layout).",
    )


def _sequence_over_ranks(sizes: Sizes, shape: ModelShape) -> BrokenRule | None:
    length = shape.seq_length
    if length is None:
        return None
    shards = sizes.cp * (sizes.tp if shape.sequence_parallel else 1)
    if length % shards:
        names = "TP x CP" if shape.sequence_parallel else "CP"
        return BrokenRule(
            f"The sequence must be a multiple of {names}, but --seq-length is {length} and "
            f"{names} is {shards}.",
            f"Set --seq-length to {_around(length, shards)}.",
        )
    if sizes.cp > 1 and length % (2 * sizes.cp):
        return BrokenRule(
            "With context parallelism each rank holds two pieces of a sequence, so that it must "
            f"be a multiple of 2 x CP, but --seq-length is {length} and 2 x CP is {2 * sizes.cp}.",
            f"Set --seq-length to {_around(length, 2 * sizes.cp)}.",
        )
    return None


def _batch_over_replicas(sizes: Sizes, shape: ModelShape) -> BrokenRule | None:
    micro, batch = shape.micro_batch_size, shape.global_batch_size
    if micro is None or batch is None:
        return None
    step = micro * sizes.dp
    if batch % step:
        return BrokenRule(
            "The global batch must be a multiple of micro-batch x DP, but --global-batch-size is "
            f"{batch} and micro-batch x DP is {micro} x {sizes.dp} = {step}.",
            f"Set --global-batch-size to {_around(batch, step)}, or change --micro-batch-size.",
        )
    if sizes.vp > 1:
        return _micro_batches_over_chunks(sizes, shape, batch, step)
    return None


def _micro_batches_over_chunks(
    sizes: Sizes, shape: ModelShape, batch: int, step: int
) -> BrokenRule | None:
    """Return what Megatron's interleaved schedule would refuse in the first iteration."""
    micro_batches, group = batch // step, shape.chunk_group or sizes.pp
    made = f"--global-batch-size {batch} makes {micro_batches} micro-batches"
    if micro_batches < sizes.pp:
        return BrokenRule(
            "Virtual pipeline chunks need at least as many micro-batches as stages, but "
            f"{made} and {FLAGS['pp']} is {sizes.pp}.",
            f"Set --global-batch-size to {step * sizes.pp} or more.",
        )
    if not sizes.pp <= group <= micro_batches:
        return BrokenRule(
            "Virtual pipeline chunks take at least as many micro-batches at a time as there are "
            f"stages, and at most all, but {_CHUNK_GROUP} is {group}, {FLAGS['pp']} {sizes.pp} "
            f"and {made}.",
            f"Leave {_CHUNK_GROUP} away.",
        )
    if 0 < micro_batches % group < sizes.pp:
        return BrokenRule(
            f"Virtual pipeline chunks take {group} micro-batches at a time ({_CHUNK_GROUP}, "
            f"{FLAGS['pp']} unless given), and those left over must be none or at least as many "
            f"as the {sizes.pp} stages, but {made}: {micro_batches % group} would be left over.",
            f"Set --global-batch-size to {_around(batch, step * group)}.",
        )
    return None


def _capacity_group_over_ep(sizes: Sizes, shape: ModelShape) -> BrokenRule | None:
    if shape.num_experts is None or shape.capacity_group != "ep":
        return None
    if (sizes.ep * sizes.etp) % (sizes.tp * sizes.cp) == 0:
        return None
    return BrokenRule(
        "Counting capacity over the expert-parallel group needs whole micro-batches in it: ETP x "
        f"EP must be a multiple of TP x CP, but ETP x EP is {sizes.etp} x {sizes.ep} and TP x CP "
        f"is {sizes.tp} x {sizes.cp}.",
        "Set --switch-capacity-group microbatch.",
    )


_RULES: tuple[Callable[[Sizes, ModelShape], BrokenRule | None], ...] = (
    _experts_over_ep,
    _experts_need_sequence_parallel,
    _experts_over_etp,
    _heads_over_tp,
    _width_over_tp,
    _vocabulary_over_tp,
    _layers_over_stages,
    _sequence_over_ranks,
    _batch_over_replicas,
    _capacity_group_over_ep,
)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _around(value: int, step: int) -> str:
    """Return the multiples of ``step`` next to ``value``, as words."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)
