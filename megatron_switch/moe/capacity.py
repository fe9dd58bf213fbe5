"""Expert capacity, equation (3) of the paper, in exact arithmetic.

The factor is read as the decimal that the user typed (0.07 is 7/100, not the nearest binary
fraction), so ``tokens * factor / experts`` is exact and no capacity is off by one because of
floating-point error. Rounding, least capacity and the clamp to the number of tokens are those of
Mesh-TensorFlow, ``max(min(tokens, rounded), min_capacity)``; the other roundings are those of the
systems named in ``--switch-capacity-rounding``.

A negative factor drops nothing: the capacity is the number of tokens. A factor of 0 is refused.

Sources:
    Switch Transformer, https://arxiv.org/abs/2101.03961, section 2.2, equation (3).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

from megatron_switch.errors import ConfigError

_ROUNDINGS: dict[str, Callable[[Fraction], int]] = {
    "floor": math.floor,
    "round": round,
    "ceil": math.ceil,
}
"""``round`` of a Fraction takes an exact half to the even neighbour."""


def expert_capacity(
    num_tokens: int,
    num_experts: int,
    capacity_factor: float,
    *,
    min_capacity: int = 4,
    rounding: Literal["floor", "round", "ceil"] = "floor",
) -> int:
    """Return the slots that each expert has for one group of tokens.

    Args:
        num_tokens: Tokens in the group over which capacity is counted, padding included, so that
            the number is known without looking at the batch.
        num_experts: Experts in the whole layer.
        capacity_factor: Slots per token that a perfectly balanced router would need; 1.0 gives each
            expert its fair share. Negative: no token is dropped and ``min_capacity`` plays no part.
        min_capacity: Least result, even where it exceeds ``num_tokens``.
        rounding: How a fractional number of slots becomes whole; ``round`` takes halves to even.

    Returns:
        ``max(min(num_tokens, rounded), min_capacity)``, or ``num_tokens`` for a negative factor.

    Raises:
        ConfigError: If the factor is 0 or not finite, a count is out of range, or the rounding is
            unknown.

    Source:
        Switch Transformer, arXiv:2101.03961, equation (3).
    """
    if num_tokens < 0 or num_experts < 1:
        raise ConfigError(
            f"Capacity needs at least 0 tokens and 1 expert, got {num_tokens} tokens and "
            f"{num_experts} experts. Check --num-experts."
        )
    if min_capacity < 0:
        raise ConfigError(f"--switch-min-capacity must be at least 0, got {min_capacity}.")
    if rounding not in _ROUNDINGS:
        raise ConfigError(
            f"--switch-capacity-rounding must be one of {list(_ROUNDINGS)}, got {rounding!r}."
        )
    if capacity_factor == 0 or not math.isfinite(capacity_factor):
        raise ConfigError(
            "A capacity factor is a finite number other than 0, which would drop every token; got "
            f"{capacity_factor}. Set --moe-expert-capacity-factor (training) or "
            "--switch-eval-capacity-factor (evaluation) to a positive number, or to a negative one "
            "to drop no token."
        )
    if capacity_factor < 0:
        return num_tokens
    exact = num_tokens * Fraction(str(capacity_factor)) / num_experts
    return max(min(num_tokens, _ROUNDINGS[rounding](exact)), min_capacity)
