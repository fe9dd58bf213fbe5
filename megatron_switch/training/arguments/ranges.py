"""Checks of single numbers on the command line, before anything reckons with them.

Megatron checks some of them late, with an assertion or a division by zero, and some never: a
capacity factor that is not a number trains until the first evaluation. A flag that is not given is
not checked.
"""

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_switch.errors import ConfigError

_LARGEST = 2**40
"""No count here has a use for more, and products of larger ones leave 64 bits."""


@dataclass(frozen=True)
class _Range:
    """What a flag's number may be."""

    least: float
    most: float = math.inf
    least_itself: bool = True
    most_itself: bool = True

    def holds(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        above = value >= self.least if self.least_itself else value > self.least
        below = value <= self.most if self.most_itself else value < self.most
        return above and below

    def __str__(self) -> str:
        parts = []
        if self.least > -math.inf:
            parts.append(f"{'at least' if self.least_itself else 'above'} {self.least:g}")
        if self.most < math.inf:
            parts.append(f"{'at most' if self.most_itself else 'below'} {self.most:g}")
        return " and ".join(parts) or "a number"


_COUNT = _Range(1, _LARGEST)
_COUNT_OR_NONE = _Range(0, _LARGEST)
_ANY = _Range(-math.inf)
_NOT_NEGATIVE = _Range(0)
_POSITIVE = _Range(0, least_itself=False)
_PROBABILITY = _Range(0, 1)
_LESS_THAN_ONE = _Range(0, 1, most_itself=False)

_RANGES: dict[str, _Range] = {
    **dict.fromkeys(
        (
            "num_layers",
            "decoder_num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "moe_ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "seq_length",
            "decoder_seq_length",
            "max_position_embeddings",
            "make_vocab_size_divisible_by",
            "vocab_size",
            "micro_batch_size",
            "global_batch_size",
            "train_iters",
            "train_samples",
            "eval_interval",
            "log_interval",
            "tensorboard_log_interval",
            "save_interval",
            "exit_interval",
            "recompute_num_layers",
            "switch_capacity",
            "switch_overlap_chunks",
            "switch_metrics_interval",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "num_experts",
            "eval_iters",
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_warmup_iters",
            "lr_warmup_samples",
            "num_workers",
            "seed",
            "switch_min_capacity",
        ),
        _COUNT_OR_NONE,
    ),
    **dict.fromkeys(("moe_expert_capacity_factor", "switch_eval_capacity_factor"), _ANY),
    **dict.fromkeys(
        (
            "lr",
            "min_lr",
            "lr_warmup_init",
            "weight_decay",
            "start_weight_decay",
            "end_weight_decay",
            "clip_grad",
            "init_method_std",
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
        ),
        _NOT_NEGATIVE,
    ),
    **dict.fromkeys(("adam_eps", "rotary_base"), _POSITIVE),
    **dict.fromkeys(("lr_warmup_fraction", "rotary_percent"), _PROBABILITY),
    **dict.fromkeys(
        (
            "adam_beta1",
            "adam_beta2",
            "hidden_dropout",
            "attention_dropout",
            "moe_input_jitter_eps",
            "switch_expert_dropout",
        ),
        _LESS_THAN_ONE,
    ),
}


def check_flag_values(args: Namespace) -> None:
    """Raise ConfigError if a number is none that its flag can have.

    Args:
        args: Parsed arguments, before anything is derived from them.
    """
    wrong = [
        f"\n  --{name.replace('_', '-')} {value:g}: must be {_finite(value)}{allowed}."
        for name, allowed in _RANGES.items()
        for value in _numbers(getattr(args, name, None))
        if not allowed.holds(value)
    ]
    if wrong:
        raise ConfigError(f"These flags cannot have the values that were given:{''.join(wrong)}")


def _finite(value: float) -> str:
    return "" if math.isfinite(value) else "finite and "


def _numbers(value: object) -> Iterator[float]:
    """Yield the numbers of a flag that has one, or several."""
    for each in value if isinstance(value, list | tuple) else (value,):
        if isinstance(each, int | float) and not isinstance(each, bool):
            yield each
