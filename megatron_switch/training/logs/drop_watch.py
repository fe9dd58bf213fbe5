"""One warning when the drop rate stays high after warm-up.

Early in training routing is uneven and drops are normal. What matters is a drop rate that stays
high after warm-up *and* lies above what even a perfectly balanced router would drop at the same
capacity. The routers count, exactly, what would be dropped at other capacity factors, so the
warning can name the factor that suffices and what it costs, instead of "try a larger one".
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_switch.config import SwitchConfig
from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.moe.metrics.routing_counts import CAPACITY_FACTOR_SWEEP, RoutingReport
from megatron_switch.planner.cost.drop_rate import balanced_drop_rate

_HIGH = 0.05
"""Drop rate from which on it is worth a warning."""
_GOOD = 0.01
"""Drop rate that the advice aims at."""
_ABOVE_BALANCED = 1.25
"""How much more than a balanced router's drops count as the router's own."""
_WINDOW = 50
"""Iterations over which rates are averaged."""
_WORST_LAYERS = 3
_MIN_WARM_UP = 100
"""Least iterations before a drop rate says anything about the router."""


@dataclass(frozen=True, kw_only=True)
class CapacityFacts:
    """Capacity in force, and what one row costs.

    Attributes:
        factor: Capacity factor in training.
        group_tokens: Tokens over which capacity is counted.
        capacity: Slots per expert and group.
        num_experts: Experts in a layer.
        rank_tokens: Tokens of one micro-batch on one rank.
        bytes_per_row: What one row costs in a sparse layer until its backward pass.
        rank_sparse_layers: Sparse layers on one rank.
        padded: Whether every slot takes room, filled or not.
        absolute: Whether the capacity was given as a number of slots.
    """

    factor: float
    group_tokens: int
    capacity: int
    num_experts: int
    rank_tokens: int
    bytes_per_row: int
    rank_sparse_layers: int
    padded: bool
    absolute: bool = False

    @classmethod
    def of(
        cls, args: Namespace, switch: SwitchConfig, *, num_sparse_layers: int
    ) -> "CapacityFacts":
        """Return the facts of a run.

        Args:
            args: Validated arguments.
            switch: Switch settings, resolved.
            num_sparse_layers: Sparse layers in the whole model.
        """
        shards = args.tensor_model_parallel_size * args.context_parallel_size
        # Of a t5's two stacks the one with fewer tokens: its groups drop more by chance alone.
        length = min(args.seq_length, args.decoder_seq_length or args.seq_length)
        tokens = length * args.micro_batch_size
        group_tokens = length if switch.capacity_group == "sequence" else tokens
        if switch.capacity_group == "ep":
            expert_ranks = args.expert_model_parallel_size * args.expert_tensor_parallel_size
            group_tokens = tokens // shards * expert_ranks
        given = args.moe_expert_capacity_factor
        factor = float("inf") if given is None or given < 0 else given
        capacity = switch.capacity
        if capacity is None:
            capacity = expert_capacity(
                group_tokens,
                args.num_experts,
                -1.0 if factor == float("inf") else factor,
                min_capacity=switch.min_capacity,
                rounding=switch.capacity_rounding,
            )
        else:
            factor = capacity * args.num_experts / group_tokens
        hidden = args.moe_ffn_hidden_size * (3 if args.swiglu else 2)
        # A row's input and output, and its hidden activation before and after the nonlinearity.
        elements = 2 * args.hidden_size + hidden // args.expert_tensor_parallel_size
        return cls(
            factor=factor,
            group_tokens=group_tokens,
            capacity=capacity,
            num_experts=args.num_experts,
            rank_tokens=tokens // shards,
            bytes_per_row=elements * (2 if args.bf16 or args.fp16 else 4),
            rank_sparse_layers=-(-num_sparse_layers // args.pipeline_model_parallel_size),
            padded=switch.dispatch == "padded",
            absolute=switch.capacity is not None,
        )

    def flag(self, factor: float) -> str:
        """Return the flag that sets a capacity, at a factor."""
        if self.absolute:
            return f"--switch-capacity {round(factor * self.group_tokens / self.num_experts)}"
        return f"--moe-expert-capacity-factor {factor}"


def drop_watch_of(
    args: Namespace, switch: SwitchConfig, *, num_sparse_layers: int, say: Callable[[str], None]
) -> "DropWatch":
    """Return the watch of a run.

    Args:
        args: Validated arguments.
        switch: Switch settings, resolved.
        num_sparse_layers: Sparse layers in the whole model.
        say: Prints the warning.
    """
    facts = CapacityFacts.of(args, switch, num_sparse_layers=num_sparse_layers)
    return DropWatch(facts, warm_up=max(args.lr_warmup_iters or 0, _MIN_WARM_UP), say=say)


class DropWatch:
    """Reads every routing report and warns at most once.

    Args:
        facts: Capacity in force and what a row costs.
        warm_up: Iterations of the run without a warning.
        say: Prints the warning.
    """

    def __init__(self, facts: CapacityFacts, *, warm_up: int, say: Callable[[str], None]) -> None:
        self._facts = facts
        self._warm_up = warm_up
        self._say = say
        self._recent: list[RoutingReport] = []
        self._done = False
        floor = balanced_drop_rate(facts.group_tokens, facts.num_experts, facts.capacity)
        self._threshold = max(_HIGH, _ABOVE_BALANCED * floor)

    def __call__(self, report: RoutingReport, iteration: int) -> None:
        """Take one step's report."""
        if self._done or iteration <= self._warm_up:
            return
        self._recent = [*self._recent[1 - _WINDOW :], report]
        if len(self._recent) < _WINDOW:
            return
        dropped_L = torch.stack([one.dropped_L for one in self._recent]).mean(dim=0)
        if dropped_L.mean().item() > self._threshold:
            sweep_dropped_LF = torch.stack([one.sweep_dropped_LF for one in self._recent]).mean(
                dim=0
            )
            self._say(
                advice(self._facts, report.layer_numbers, dropped_L, sweep_dropped_LF, iteration)
            )
            self._done = True


def advice(
    facts: CapacityFacts,
    layer_numbers: tuple[int, ...],
    dropped_L: torch.Tensor,
    sweep_dropped_LF: torch.Tensor,
    iteration: int,
) -> str:
    """Return the warning's text.

    Args:
        facts: Capacity in force and what a row costs.
        layer_numbers: 1-based numbers of the sparse layers.
        dropped_L: Mean drop rate of each.
        sweep_dropped_LF: Mean drop rate of each at each factor of ``CAPACITY_FACTOR_SWEEP``.
        iteration: Current iteration.
    """
    worst = dropped_L.argsort(descending=True)[:_WORST_LAYERS].tolist()
    layers = ", ".join(f"layer {layer_numbers[i]} {dropped_L[i].item():.1%}" for i in worst)
    text = (
        f"Warning: {dropped_L.mean().item():.1%} of tokens were dropped over the last {_WINDOW} "
        f"iterations (iteration {iteration}; worst: {layers}), more than a balanced router would "
        f"drop at capacity factor {facts.factor:.4g}. "
    )
    rates_F = sweep_dropped_LF.mean(dim=0).tolist()
    larger = [
        (f, rate)
        for f, rate in zip(CAPACITY_FACTOR_SWEEP, rates_F, strict=True)
        if f > facts.factor
    ]
    enough = next((pair for pair in larger if pair[1] <= _GOOD), None)
    if enough is None:
        balance = (
            "Raise --moe-aux-loss-coeff: the load is too uneven for a higher capacity factor to "
            "help."
        )
        if not larger:
            return text + balance
        factor, rate = larger[-1]
        return f"{text}Even {facts.flag(factor)} would drop {rate:.1%}. {balance}"
    factor, rate = enough
    if facts.padded:
        rows = (factor - facts.factor) * facts.rank_tokens
    else:
        rows = (dropped_L.mean().item() - rate) * facts.rank_tokens
    mebibytes = rows * facts.bytes_per_row * facts.rank_sparse_layers / 2**20
    return (
        f"{text}{facts.flag(factor)} would drop {rate:.1%} and cost about "
        f"{mebibytes:.1f} MiB more a rank and micro-batch. Raise it before you make the batch "
        "smaller: a smaller batch makes drops more frequent, not rarer."
    )
