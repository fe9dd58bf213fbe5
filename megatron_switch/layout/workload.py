"""How a model is trained, as far as memory and time depend on it: batch, precision, dispatch.

Plain values, named after the flags that set them. Together with the model
(:class:`~megatron_switch.architecture.model.Architecture`) and the ranks
(:class:`~megatron_switch.layout.grid.Layout`) they decide every prediction of this folder.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from megatron_switch.layout.grid import Layout
from megatron_switch.moe.capacity import expert_capacity

Dispatch = Literal["packed", "padded"]
Sharding = Literal["replicated", "distributed", "fully_sharded"]
"""Where optimizer state lives: on every copy of a parameter; cut over them
(``--use-distributed-optimizer``); weights and gradients cut as well (``--use-megatron-fsdp``)."""
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Slots of an expert, as the flags of the same names say.

    Attributes:
        factor: ``--moe-expert-capacity-factor``; negative drops nothing.
        slots: ``--switch-capacity``; instead of the factor.
        least: ``--switch-min-capacity``.
        rounding: ``--switch-capacity-rounding``.
        group: ``--switch-capacity-group``.
    """

    factor: float = 1.25
    slots: int | None = None
    least: int = 4
    rounding: Literal["floor", "round", "ceil"] = "floor"
    group: Literal["microbatch", "sequence", "ep"] = "microbatch"

    def of(self, group_tokens: int, num_experts: int) -> int:
        """Return the slots that each expert has for one group of ``group_tokens`` tokens."""
        if self.slots is not None:
            return self.slots
        return _capacity(group_tokens, num_experts, self)


@lru_cache(maxsize=8192)
def _capacity(group_tokens: int, num_experts: int, capacity: Capacity) -> int:
    """Compute the capacity in exact fractions; remembered, because that is slow."""
    return expert_capacity(
        group_tokens,
        num_experts,
        capacity.factor,
        min_capacity=capacity.least,
        rounding=capacity.rounding,
    )


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything but model and ranks.

    Attributes:
        seq_length: Tokens of a sequence.
        micro_batch_size: Sequences of a micro-batch on one data-parallel rank.
        global_batch_size: Sequences of an optimizer step over all ranks.
        precision: Of weights and activations; fp32 masters and moments are added below fp32.
        sequence_parallel: Whether norms and routers work on 1/TP of the tokens.
        dispatch: ``--switch-dispatch``, resolved.
        capacity: Slots of an expert.
        sharding: Where optimizer state lives.
        offload_optimizer: ``--optimizer-cpu-offload``: masters and moments are on the host.
        recompute: ``--recompute-granularity``.
        recompute_modules: ``--recompute-modules``, with ``selective``.
        recompute_layers: ``--recompute-num-layers``: layers of one chunk, with ``full``.
        transformer_engine: Whether modules are Transformer Engine's, or plain torch.
        device: What kernels run on; dropout on the CPU keeps its noise, not a mask.
        hidden_dropout: ``--hidden-dropout``.
        rotary: Whether queries and keys are rotated (``--position-embedding-type rope``).
        fused_gate: Whether a gated activation keeps its input only (bias-SwiGLU fusion).
        fp32_gradients: Whether gradients are summed in fp32, as Megatron does below fp32.
    """

    seq_length: int
    micro_batch_size: int = 1
    global_batch_size: int = 1
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    sequence_parallel: bool = True
    dispatch: Dispatch = "padded"
    capacity: Capacity = field(default_factory=Capacity)
    sharding: Sharding = "distributed"
    offload_optimizer: bool = False
    recompute: Recompute = "none"
    recompute_modules: tuple[str, ...] = ()
    recompute_layers: int = 1
    transformer_engine: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    hidden_dropout: float = 0.0
    rotary: bool = False
    fused_gate: bool = True
    fp32_gradients: bool = True

    @property
    def width(self) -> int:
        """Bytes of a weight or activation element."""
        return 4 if self.precision == "fp32" else 2

    def micro_batches(self, layout: Layout) -> int:
        """Return the micro-batches of a step on each data-parallel rank, at least 1."""
        return max(1, self.global_batch_size // (self.micro_batch_size * layout.dp))

    def rank_tokens(self, layout: Layout) -> int:
        """Return the tokens of a micro-batch that one rank routes."""
        split = layout.cp * (layout.tp if self.sequence_parallel else 1)
        return self.seq_length * self.micro_batch_size // split

    def recomputes(self, module: str) -> bool:
        """Return whether a module is computed again in backward, by its name in Megatron."""
        return self.recompute == "selective" and module in self.recompute_modules


@dataclass(frozen=True)
class Slots:
    """Capacity of one layout in numbers.

    Attributes:
        group_tokens: Tokens over which capacity is counted.
        num_groups: Capacity groups of a micro-batch.
        capacity: Slots per expert and group.
    """

    group_tokens: int
    num_groups: int
    capacity: int

    @classmethod
    def of(cls, num_experts: int, layout: Layout, training: Training) -> "Slots":
        """Count the slots that ``num_experts`` experts have in this layout."""
        micro_batch = training.seq_length * training.micro_batch_size
        group, num_groups = micro_batch, 1
        if training.capacity.group == "sequence":
            group, num_groups = training.seq_length, training.micro_batch_size
        elif training.capacity.group == "ep":
            group = micro_batch * layout.ep * layout.etp // (layout.tp * layout.cp)
        return cls(group, num_groups, training.capacity.of(group, num_experts))
