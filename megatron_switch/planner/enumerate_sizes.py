"""Every legal choice of parallel sizes for a model on a number of GPUs, and why others are none.

The rules are those of :mod:`megatron_switch.layout.validation`; here they prune nested loops, so
that 16,384 GPUs take a fraction of a second. Refused beyond them is only what cannot train here:
context parallelism without Transformer Engine, and a pipeline under a T5.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_switch.architecture.parameters import GPTShape, T5Shape

CHOICE_SIZES = ("tp", "pp", "cp", "ep", "etp")


@dataclass(frozen=True)
class Choice:
    """Parallel sizes that form both grids."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What sizes have to divide.

    Attributes:
        world_size: GPUs.
        seq_length: Tokens of a sequence.
        global_batch_size: Sequences of a step.
        context_parallel: Whether attention can be cut over the sequence.
        capacity_group: ``--switch-capacity-group``.
    """

    world_size: int
    seq_length: int
    global_batch_size: int
    context_parallel: bool
    capacity_group: str = "microbatch"


def legal_choices(
    model: GPTShape,
    limits: Limits,
    excluded: Counter[str] | None = None,
    fixed: Mapping[str, int] | None = None,
) -> Iterator[Choice]:
    """Yield all legal choices.

    Args:
        model: The model.
        limits: What sizes have to divide.
        fixed: Sizes that are chosen already, by the names of :class:`Choice`.
        excluded: Counts, by rule, the choices of divisors of ``world_size`` that it refuses; the
            first rule that a choice breaks is counted. Counting costs time.
    """
    ranks = limits.world_size
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    sizes = {name: divisors for name in CHOICE_SIZES}
    sizes |= {name: [size] for name, size in (fixed or {}).items() if name in CHOICE_SIZES}
    count = Counter[str]() if excluded is None else excluded
    per_dense = len(sizes["ep"]) * len(sizes["etp"])
    for tp in sizes["tp"]:
        problem = _tensor_problem(model, limits, tp)
        if problem:
            count[problem] += per_dense * len(sizes["pp"]) * len(sizes["cp"])
            continue
        for pp in sizes["pp"]:
            problem = _pipeline_problem(model, limits, tp, pp)
            if problem:
                count[problem] += per_dense * len(sizes["cp"])
                continue
            for cp in sizes["cp"]:
                problem = _context_problem(limits, tp, pp, cp)
                if problem:
                    count[problem] += per_dense
                    continue
                yield from _expert_choices(model, limits, (tp, pp, cp), sizes, count)


def _expert_choices(
    model: GPTShape,
    limits: Limits,
    dense: tuple[int, int, int],
    sizes: Mapping[str, list[int]],
    count: Counter[str],
) -> Iterator[Choice]:
    tp, pp, cp = dense
    if not model.num_experts:
        if sizes["ep"][0] == 1 and tp in sizes["etp"]:
            yield Choice(tp, pp, cp, 1, tp)
        return
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size
    for ep in sizes["ep"]:
        if model.num_experts % ep:
            count["experts must be a multiple of EP"] += len(sizes["etp"])
            continue
        for etp in sizes["etp"]:
            if limits.world_size % (etp * ep * pp):
                count["ETP x EP x PP must divide the GPUs"] += 1
            elif width % etp:
                count["an expert's width must be a multiple of ETP"] += 1
            elif etp > 1 and model.linear_bias:
                count["experts of a model with biases cannot be cut (--disable-bias-linear)"] += 1
            elif limits.capacity_group == "ep" and ep * etp % (tp * cp):
                count["--switch-capacity-group ep needs EP x ETP to be a multiple of TP x CP"] += 1
            else:
                yield Choice(tp, pp, cp, ep, etp)


def _tensor_problem(model: GPTShape, limits: Limits, tp: int) -> str:
    groups = model.num_query_groups
    if model.num_attention_heads % tp or (groups and groups % tp and tp % groups):
        return "attention heads must be a multiple of TP"
    if model.ffn_hidden_size % tp:
        return "the feed-forward width must be a multiple of TP"
    if model.padded_vocab_size % tp:
        return "the padded vocabulary must be a multiple of TP"
    if limits.seq_length % tp:
        return "the sequence must be a multiple of TP (sequence parallelism)"
    return ""


def _pipeline_problem(model: GPTShape, limits: Limits, tp: int, pp: int) -> str:
    if limits.world_size % (tp * pp):
        return "TP x CP x PP must divide the GPUs"
    if isinstance(model, T5Shape) and pp > 1:
        return "encoder and decoder of a T5 stand on one pipeline stage"
    if model.num_layers % pp:
        return "layers must be a multiple of PP"
    return ""


def _context_problem(limits: Limits, tp: int, pp: int, cp: int) -> str:
    if cp > 1 and not limits.context_parallel:
        return "context parallelism needs Transformer Engine (--transformer-engine)"
    if limits.world_size % (tp * pp * cp):
        return "TP x CP x PP must divide the GPUs"
    if cp > 1 and (limits.seq_length % (2 * cp) or limits.seq_length % (cp * tp)):
        return "the sequence must be a multiple of 2 x CP and of TP x CP"
    if limits.global_batch_size % (limits.world_size // (tp * pp * cp)):
        return "the global batch must be a multiple of DP"
    return ""
