"""The capacity that a run has, and which capacity would drop few tokens at which cost.

The routers count, exactly, what would be dropped at other capacity factors, so the advice can name
the factor that suffices and what it costs, instead of "try a larger one".
"""

from argparse import Namespace
from dataclasses import dataclass

from megatron_switch.config import SwitchConfig
from megatron_switch.moe.capacity import expert_capacity
from megatron_switch.moe.metrics.routing_counts import CAPACITY_FACTOR_SWEEP
from megatron_switch.planner.cost.drop_rate import balanced_drop_rate

_GOOD = 0.01
"""Drop rate that the advice aims at."""


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

    def balanced_drop_rate(self) -> float:
        """Return the fraction of tokens that even a balanced router would drop."""
        return balanced_drop_rate(self.group_tokens, self.num_experts, self.capacity)

    def flag(self, factor: float) -> str:
        """Return the flag that sets a capacity, at a factor."""
        if self.absolute:
            return f"--switch-capacity {round(factor * self.group_tokens / self.num_experts)}"
        return f"--moe-expert-capacity-factor {factor}"


def capacity_advice(facts: CapacityFacts, dropped: float, sweep: list[float]) -> str:
    """Return which capacity would drop few tokens, and what it costs.

    Args:
        facts: Capacity in force and what a row costs.
        dropped: Mean drop rate.
        sweep: Mean drop rate at each factor of ``CAPACITY_FACTOR_SWEEP``.
    """
    larger = [
        (factor, rate)
        for factor, rate in zip(CAPACITY_FACTOR_SWEEP, sweep, strict=True)
        if factor > facts.factor
    ]
    if not larger:
        return "the load is too uneven for a higher capacity factor to help"
    enough = next((pair for pair in larger if pair[1] <= _GOOD), None)
    if enough is None:
        factor, rate = larger[-1]
        return (
            f"even {facts.flag(factor)} would drop {rate:.1%}, so the load is too uneven for a "
            "higher capacity factor to help"
        )
    factor, rate = enough
    added = factor - facts.factor if facts.padded else dropped - rate
    mebibytes = added * facts.rank_tokens * facts.bytes_per_row * facts.rank_sparse_layers / 2**20
    return (
        f"{facts.flag(factor)} would drop {rate:.1%} and cost about {mebibytes:.1f} MiB more a "
        "rank and micro-batch; raise it before you make the batch smaller, because a smaller batch "
        "makes drops more frequent, not rarer"
    )
