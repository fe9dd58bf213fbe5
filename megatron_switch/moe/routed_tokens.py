"""What a router hands to a dispatcher: every token's expert, slot, gate and capacity group.

Slots are final here: they are counted over the whole capacity group, whichever ranks hold it, so a
dispatcher never has to ask other ranks who came first.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron_switch.moe.routing import SwitchRouting


@dataclass(frozen=True)
class RoutedTokens:
    """Tokens of this rank, routed. Rows are batch-major: row ``t = b * S_local + s``."""

    routing: SwitchRouting
    """Expert, gate, slot and kept of every token; slots count over the whole capacity group."""
    group_T: Tensor
    """int64, capacity group of the token inside its micro-batch, in [0, num_groups)."""
    num_groups: int
    """Capacity groups of one micro-batch: 1, or the number of sequences."""
    capacity: int
    """Slots per expert and capacity group."""
    key_T: Tensor | None = None
    """int64, random key of the token; None where experts draw nothing."""
