"""Which sizes fit a model and a batch: what each parallel size has to divide.

The rules are those of Megatron-Core 0.19.2 (``training/arguments.py``, ``TransformerConfig``,
its schedules), collected where a user can still act on them, plus one of ours: the padded
vocabulary is divisible by TP without growing, so that it does not depend on the layout. A value
that is not given is not checked.

The tables at the end of the file are the only statement of these rules: a validator asks for all
that are broken (:mod:`megatron_switch.layout.validation`), the planner filters through them
(:mod:`megatron_switch.planner.legal_sizes`). A rule reads only the sizes that its table names.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_switch.layout.grid_rules import BrokenRule, broken_grid_rule
from megatron_switch.layout.sizes import FLAGS, Sizes, divisors

_CHUNK_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@dataclass(frozen=True, kw_only=True)
class LayoutConstraints:
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
        one_stage: Whether the architecture has no pipeline stages, as a T5.
        whole_sequences: Whether attention needs whole sequences: a T5's, or plain torch's.
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
    one_stage: bool = False
    whole_sequences: bool = False


def broken_rules(sizes: Sizes, given: LayoutConstraints) -> list[BrokenRule]:
    """Return every rule that ``sizes`` break; empty where they are legal for ``given``."""
    no_grid = broken_grid_rule(sizes)
    if no_grid:  # the model's rules are about DP and EDP too, which do not exist then
        return [no_grid]
    rules = (*DENSE_RULES, *EXPERT_RULES, *JOINT_RULES)
    return [broken for rule in rules if (broken := rule(sizes, given)) is not None]


def uneven_experts(num_experts: int, ep: int) -> BrokenRule | None:
    """Return what is wrong where ``ep`` ranks cannot hold equally many of the experts."""
    if num_experts % ep == 0:
        return None
    return BrokenRule(
        "Experts must be a multiple of EP",
        f"{num_experts} experts cannot be shared evenly by {ep} expert-parallel ranks "
        f"({num_experts % ep} would be left over).",
        f"{FLAGS['ep']} must be one of {divisors(num_experts)}, or change --num-experts.",
    )


def _experts_over_ep(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    if given.num_experts is not None:
        return uneven_experts(given.num_experts, sizes.ep)
    if sizes.ep == 1:
        return None
    return BrokenRule(
        "Expert parallelism needs experts",
        f"{FLAGS['ep']} {sizes.ep} spreads experts over ranks, but the model has none.",
        "Set --num-experts.",
    )


def _experts_over_etp(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    if given.num_experts is None or sizes.etp == 1:
        return None
    source = f"which is {FLAGS['tp']} unless given" if sizes.etp_follows_tp else "as given"
    if given.add_bias_linear:
        return BrokenRule.of(
            "Experts with a bias cannot be cut over ranks",
            f"{FLAGS['etp']} is {sizes.etp} ({source})",
            f"Add --disable-bias-linear, or set {FLAGS['etp']} 1.",
        )
    width = given.moe_ffn_hidden_size
    if width is None or width % sizes.etp == 0:
        return None
    return BrokenRule.of(
        "An expert's hidden width must be a multiple of ETP",
        f"--moe-ffn-hidden-size is {width} and {FLAGS['etp']} is {sizes.etp} ({source})",
        f"Use a width that is a multiple of {sizes.etp}, or set {FLAGS['etp']} 1.",
    )


def _experts_need_sequence_parallel(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    if given.num_experts is None or sizes.tp == 1 or given.sequence_parallel:
        return None
    return BrokenRule(
        "Experts with TP above 1 need sequence parallelism",
        f"With experts and {FLAGS['tp']} {sizes.tp} (above 1), sequence parallelism is required: "
        f"without it each of the {sizes.tp} tensor-parallel ranks would route the same tokens.",
        "Add --sequence-parallel.",
    )


def _heads_over_tp(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    heads, groups = given.num_attention_heads, given.num_query_groups
    if heads is not None and heads % sizes.tp:
        return BrokenRule.of(
            "Attention heads must be a multiple of TP",
            f"--num-attention-heads is {heads} and {FLAGS['tp']} is {sizes.tp}",
            f"Use one of {divisors(heads)} as {FLAGS['tp']}, or change --num-attention-heads.",
        )
    if groups is not None and groups % sizes.tp and sizes.tp % groups:
        return BrokenRule.of(
            "Query groups must be a multiple or a divisor of TP",
            f"--num-query-groups is {groups} and {FLAGS['tp']} is {sizes.tp}",
            f"Use one of {divisors(groups)} as {FLAGS['tp']}, or change --num-query-groups.",
        )
    return None


def _width_over_tp(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    width = given.ffn_hidden_size
    if width is None or width % sizes.tp == 0:
        return None
    return BrokenRule.of(
        "The feed-forward width must be a multiple of TP",
        f"--ffn-hidden-size is {width} and {FLAGS['tp']} is {sizes.tp}",
        f"Use a width that is a multiple of {sizes.tp}.",
    )


def _vocabulary_over_tp(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    rows = given.padded_vocab_size
    if rows is None or rows % sizes.tp == 0:
        return None
    return BrokenRule.of(
        "The padded vocabulary must be a multiple of TP",
        f"it has {rows} rows and {FLAGS['tp']} is {sizes.tp}",
        f"Set --make-vocab-size-divisible-by to a multiple of {sizes.tp}; this changes the model, "
        "and checkpoints of the other size no longer fit.",
    )


def _stages_of_the_architecture(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    if not given.one_stage or sizes.pp == 1:
        return None
    return BrokenRule.of(
        "Encoder and decoder of a T5 must be on one pipeline stage",
        f"{FLAGS['pp']} is {sizes.pp}",
        f"Set {FLAGS['pp']} 1.",
    )


def _layers_over_stages(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    chunks = sizes.pp * sizes.vp
    if sizes.vp > 1 and sizes.pp == 2 and not given.overlap_p2p:
        return BrokenRule.of(
            "Virtual pipeline chunks without overlap of pipeline communication need more than two "
            "stages",
            f"{FLAGS['pp']} is 2 with --no-overlap-p2p-communication",
            "Omit --no-overlap-p2p-communication.",
        )
    if given.num_layers is None or given.num_layers % chunks == 0:
        return None
    return BrokenRule.of(
        "Layers must be a multiple of PP x VP",
        f"--num-layers is {given.num_layers} and there are {sizes.pp} stages x {sizes.vp} chunks = "
        f"{chunks}",
        f"Set --num-layers to {_around(given.num_layers, chunks)}, or place layers unevenly "
        "(--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers, "
        "--pipeline-model-parallel-layout).",
    )


def _sequence_over_ranks(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    if sizes.cp > 1 and given.whole_sequences:
        return BrokenRule.of(
            "Context parallelism needs Transformer Engine's attention, in a decoder-only model",
            f"{FLAGS['cp']} is {sizes.cp}",
            f"Use --transformer-impl transformer_engine, or set {FLAGS['cp']} 1.",
        )
    length = given.seq_length
    if length is None:
        return None
    shards = sizes.cp * (sizes.tp if given.sequence_parallel else 1)
    if length % shards:
        names = "TP x CP" if given.sequence_parallel else "CP"
        return BrokenRule.of(
            f"The sequence must be a multiple of {names}",
            f"--seq-length is {length} and {names} is {shards}",
            f"Set --seq-length to {_around(length, shards)}.",
        )
    if sizes.cp > 1 and length % (2 * sizes.cp):
        return BrokenRule(
            "The sequence must be a multiple of 2 x CP",
            "With context parallelism each rank holds two pieces of a sequence, so that it must "
            f"be a multiple of 2 x CP, but --seq-length is {length} and 2 x CP is {2 * sizes.cp}.",
            f"Set --seq-length to {_around(length, 2 * sizes.cp)}.",
        )
    return None


def batch_over_replicas(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    """Return what is wrong where DP ranks cannot share the batch, or VP chunks take turns in it."""
    micro, batch = given.micro_batch_size, given.global_batch_size
    if micro is None or batch is None:
        return None
    step = micro * sizes.dp
    if batch % step:
        return BrokenRule.of(
            "The global batch must be a multiple of micro-batch x DP",
            f"--global-batch-size is {batch} and micro-batch x DP is {micro} x {sizes.dp} = {step}",
            f"Set --global-batch-size to {_around(batch, step)}, or change --micro-batch-size.",
        )
    if sizes.vp > 1:
        return _micro_batches_over_chunks(sizes, given, batch, step)
    return None


def _micro_batches_over_chunks(
    sizes: Sizes, given: LayoutConstraints, batch: int, step: int
) -> BrokenRule | None:
    """Return what Megatron's interleaved schedule would refuse in the first iteration."""
    micro_batches, group = batch // step, given.chunk_group or sizes.pp
    made = f"--global-batch-size {batch} makes {micro_batches} micro-batches"
    if micro_batches < sizes.pp:
        return BrokenRule.of(
            "Virtual pipeline chunks need at least as many micro-batches as stages",
            f"{made} and {FLAGS['pp']} is {sizes.pp}",
            f"Set --global-batch-size to {step * sizes.pp} or more.",
        )
    if not sizes.pp <= group <= micro_batches:
        return BrokenRule.of(
            "Virtual pipeline chunks take at least as many micro-batches at a time as there are "
            "stages, and at most all",
            f"{_CHUNK_GROUP} is {group}, {FLAGS['pp']} {sizes.pp} and {made}",
            f"Omit {_CHUNK_GROUP}.",
        )
    if 0 < micro_batches % group < sizes.pp:
        return BrokenRule(
            "Virtual pipeline chunks leave no micro-batches over, or as many as there are stages",
            f"Virtual pipeline chunks take {group} micro-batches at a time ({_CHUNK_GROUP}, "
            f"{FLAGS['pp']} unless given), and those left over must be none or at least as many "
            f"as the {sizes.pp} stages, but {made}: {micro_batches % group} would be left over.",
            f"Set --global-batch-size to {_around(batch, step * group)}.",
        )
    return None


def _capacity_group_over_ep(sizes: Sizes, given: LayoutConstraints) -> BrokenRule | None:
    if given.num_experts is None or given.capacity_group != "ep":
        return None
    if (sizes.ep * sizes.etp) % (sizes.tp * sizes.cp) == 0:
        return None
    return BrokenRule(
        "--switch-capacity-group ep needs ETP x EP to be a multiple of TP x CP",
        "Counting capacity over the expert-parallel group needs whole micro-batches in it: ETP x "
        f"EP must be a multiple of TP x CP, but ETP x EP is {sizes.etp} x {sizes.ep} and TP x CP "
        f"is {sizes.tp} x {sizes.cp}.",
        "Set --switch-capacity-group microbatch.",
    )


def _around(value: int, step: int) -> str:
    """Return the multiples of ``step`` next to ``value``, as words."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


ModelRule = Callable[[Sizes, LayoutConstraints], BrokenRule | None]
"""Returns what is wrong with sizes for a model and batch, or None where the rule holds."""

DENSE_RULES: tuple[ModelRule, ...] = (
    _experts_need_sequence_parallel,
    _heads_over_tp,
    _width_over_tp,
    _vocabulary_over_tp,
    _stages_of_the_architecture,
    _layers_over_stages,
    _sequence_over_ranks,
    batch_over_replicas,
)
"""Rules that read TP, CP, PP and VP only."""

EXPERT_RULES: tuple[ModelRule, ...] = (_experts_over_ep, _experts_over_etp)
"""Rules that read ETP, EP and PP only."""

JOINT_RULES: tuple[ModelRule, ...] = (_capacity_group_over_ep,)
"""Rules that read sizes of both grids."""
