"""How many tokens a perfectly balanced router still drops, in closed form.

Even when each of ``E`` experts is equally likely, the number of tokens that choose one expert is
binomial, and what exceeds the capacity is dropped. A measured drop rate says something about the
router only where it is above this floor.
"""

from functools import lru_cache
from math import exp, lgamma, log


@lru_cache(maxsize=65536)  # a long sum, and a plan asks for few different ones many times
def balanced_drop_rate(num_tokens: int, num_experts: int, capacity: int) -> float:
    """Return the expected fraction of dropped tokens when routing is uniformly random.

    It is ``E / T * sum_{n > C} (n - C) * Binomial(T, 1/E)(n)``.

    Args:
        num_tokens: Tokens ``T`` in one capacity group.
        num_experts: Experts ``E``, at least 1.
        capacity: Slots ``C`` per expert and group.

    Returns:
        Dimensionless, in [0, 1].
    """
    if num_tokens == 0:
        return 0.0
    if num_experts == 1:
        return max(0, num_tokens - capacity) / num_tokens
    log_hit, log_miss = -log(num_experts), log(1.0 - 1.0 / num_experts)
    excess = 0.0
    for count in range(capacity + 1, num_tokens + 1):
        log_probability = (
            lgamma(num_tokens + 1)
            - lgamma(count + 1)
            - lgamma(num_tokens - count + 1)
            + count * log_hit
            + (num_tokens - count) * log_miss
        )
        term = (count - capacity) * exp(log_probability)
        excess += term
        if term < 1e-12 * excess and count > num_tokens / num_experts:
            break
    return min(1.0, excess * num_experts / num_tokens)
