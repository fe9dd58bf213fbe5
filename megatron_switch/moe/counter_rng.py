"""Counter-based random numbers: a function of a key, not of the state of a stream.

Jitter and expert dropout must be the same in every layout, in both dispatch modes, in recomputed
activations and after a resume. A random stream cannot do that: how far it has advanced depends on
how many tokens a rank happened to hold. Here a 64-bit key identifies a token (seed, iteration,
micro-batch, layer, position in the batch), and column ``c`` of its noise is a hash of the key and
``c``. There is no state; only keys are saved, and backward computes the noise again.

The hash is the output function of SplitMix64, in int64 arithmetic that wraps around, so CPU and
CUDA give the same bits. It is not for cryptography.

Shape letters:

    T, R  tokens, rows                D, F  model, expert hidden

Sources:
    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
    https://doi.org/10.1145/2660193.2660195.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_switch.errors import ConfigError

_BLOCK_ELEMENTS = 1 << 20
"""Numbers drawn at a time: bounds the int64 scratch to two buffers of 8 MiB, which fit in cache."""

_JITTER, _DROPOUT = 1, 2
"""Last part of the keys of each purpose, so that one token's jitter and dropout are independent."""


def _signed(value: int) -> int:
    """Return the int64 with the same low 64 bits."""
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


_STEP = _signed(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_FIRST_FACTOR = _signed(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = _signed(0x94D049BB133111EB)


def mix(*parts: int | Tensor) -> Tensor:
    """Hash integers into keys; the order of the parts matters.

    Args:
        *parts: Integers, or integer tensors that broadcast against each other. Integers count
            modulo 2^64.

    Returns:
        Keys of the broadcast shape, int64, on the device of the tensors that are not scalars. A
        key captured in a CUDA graph changes from replay to replay only where a part that changes is
        a CUDA tensor.
    """
    key = torch.zeros((), dtype=torch.int64, device="cpu")
    for part in parts:
        key = _hash_(key + (part.long() if isinstance(part, Tensor) else _signed(part)) + _STEP)
    return key


def token_keys(step_key: int | Tensor, layer: int, position_T: Tensor) -> Tensor:
    """Return one key for each token of a layer.

    Args:
        step_key: Hash of seed, iteration and micro-batch. An integer, or a scalar integer tensor.
        layer: Number of the layer in the whole model.
        position_T: Position of each token in the whole micro-batch, whichever rank holds it, shape
            (T,), integers.

    Returns:
        Keys, shape (T,), int64.
    """
    return mix(step_key, layer, position_T)


def uniform(keys_T: Tensor, columns: int, *, first_column: int = 0) -> Tensor:
    """Return random numbers in [0, 1), multiples of 2^-24.

    Args:
        keys_T: Keys, shape (T,), int64.
        columns: Numbers for each key.
        first_column: Index of the first of them: column ``c`` of the result is number
            ``first_column + c`` of its key, whatever the other columns.

    Returns:
        Shape (T, columns), float32.
    """
    out = torch.empty(len(keys_T), columns, dtype=torch.float32, device=keys_T.device)
    # The k-th output of SplitMix64 hashes its seed plus k steps.
    offsets = torch.arange(
        first_column + 1, first_column + 1 + columns, dtype=torch.int64, device=keys_T.device
    ).mul_(_STEP)
    rows_per_block = max(1, _BLOCK_ELEMENTS // max(1, columns))
    for block, keys in zip(
        torch.split(out, rows_per_block), torch.split(keys_T, rows_per_block), strict=True
    ):
        # The upper 24 of 64 bits: as many as a float32 in [0, 1) holds exactly.
        block.copy_(_shift_right(_hash_(keys.unsqueeze(1) + offsets), 40))
    return out.mul_(2.0**-24)


def jitter(x_TD: Tensor, keys_T: Tensor, eps: float) -> Tensor:
    """Multiply each element by its own number from ``[1 - eps, 1 + eps]``.

    Args:
        x_TD: Router input, shape (T, D), float32 (or float64).
        keys_T: Keys of the tokens, shape (T,), int64; the only tensor saved for backward.
        eps: Half the width of the noise, in [0, 1).

    Returns:
        Shape and dtype of ``x_TD``; ``x_TD`` itself if ``eps`` is 0.

    Raises:
        ConfigError: If ``eps`` is out of range.

    Source:
        Switch Transformer, arXiv:2101.03961, section 2.4 and appendix C (input jitter).
    """
    if not 0.0 <= eps < 1.0:
        raise ConfigError(
            f"Router jitter multiplies by 1 - eps to 1 + eps, with eps at least 0 and below 1, got "
            f"--moe-input-jitter-eps {eps}. Switch uses 0.01."
        )
    assert x_TD.dtype in (torch.float32, torch.float64), f"jitter in {x_TD.dtype} is biased"
    if eps == 0.0:
        return x_TD
    jittered: Tensor = _Jitter.apply(x_TD, keys_T, eps)
    return jittered


def dropout(x_RF: Tensor, keys_R: Tensor, p: float, *, first_column: int = 0) -> Tensor:
    """Set each element to zero with probability ``p`` and scale the others by ``1 / (1 - p)``.

    Args:
        x_RF: Hidden activation, shape (R, F), any floating dtype.
        keys_R: Keys of the rows' tokens, shape (R,), int64; the only tensor saved for backward.
        p: Probability to drop an element, in [0, 1).
        first_column: Index of the first column in the whole hidden dim, where that is sharded.

    Returns:
        Shape and dtype of ``x_RF``; ``x_RF`` itself if ``p`` is 0.

    Raises:
        ConfigError: If ``p`` is out of range.
    """
    if not 0.0 <= p < 1.0:
        raise ConfigError(
            f"A dropout probability is at least 0 and below 1, got --switch-expert-dropout {p}."
        )
    if p == 0.0:
        return x_RF
    dropped: Tensor = _Dropout.apply(x_RF, keys_R, p, first_column)
    return dropped


class _Jitter(torch.autograd.Function):
    """``x * noise``; backward is the same function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, keys_T: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(keys_T)
        ctx.eps = eps
        noise_TD = uniform(mix(keys_T, _JITTER), x_TD.shape[1])
        return x_TD * noise_TD.mul_(2.0 * eps).add_(1.0 - eps)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None]:
        (keys_T,) = ctx.saved_tensors
        return jitter(grad_TD, keys_T, ctx.eps), None, None


class _Dropout(torch.autograd.Function):
    """``x * mask / (1 - p)``; backward is the same function of the gradient."""

    @staticmethod
    def forward(ctx: Any, x_RF: Tensor, keys_R: Tensor, p: float, first_column: int) -> Tensor:
        ctx.save_for_backward(keys_R)
        ctx.p, ctx.first_column = p, first_column
        noise_RF = uniform(mix(keys_R, _DROPOUT), x_RF.shape[1], first_column=first_column)
        return (x_RF / (1.0 - p)).masked_fill_(noise_RF < p, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor, None, None, None]:
        (keys_R,) = ctx.saved_tensors
        return dropout(grad_RF, keys_R, ctx.p, first_column=ctx.first_column), None, None, None


def _hash_(bits: Tensor) -> Tensor:
    """Apply SplitMix64's output function, in place."""
    bits.bitwise_xor_(_shift_right(bits, 30)).mul_(_FIRST_FACTOR)
    bits.bitwise_xor_(_shift_right(bits, 27)).mul_(_SECOND_FACTOR)
    return bits.bitwise_xor_(_shift_right(bits, 31))


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift int64 right and fill with zeros; torch's own shift copies the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
