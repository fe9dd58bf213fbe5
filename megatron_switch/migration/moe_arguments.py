"""The arguments of ``deepspeed.moe.layer.MoE`` as flags of ``megatron-switch train``.

They stand in a model's Python code, not in the configuration file, and are given as flags of the
same names; underscores and hyphens are the same. The names that Megatron-DeepSpeed and tutorials
use for them are taken too. DeepSpeed's defaults are written out, because they are not Switch's:
capacity factor 1.0 in training and evaluation, rounded up, counted over the tokens of one rank.
"""

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace

from megatron_switch.errors import ConfigError
from megatron_switch.migration.translation import Translation
from megatron_switch.utils.argument_types import count

_SWITCH_OFF = ("false", "no", "0", "off")
_SWITCH_ON = ("true", "yes", "1", "on")


def add_moe_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of DeepSpeed's layer to a parser."""
    group = parser.add_argument_group("arguments of deepspeed.moe.layer.MoE")
    group.add_argument("--num-experts", type=count, metavar="N")
    group.add_argument("--ep-size", "--expert-parallel-size", type=count, metavar="N")
    group.add_argument("--k", "--topk", type=count, default=1, metavar="N")
    group.add_argument("--capacity-factor", type=_finite, default=1.0, metavar="X")
    group.add_argument("--eval-capacity-factor", type=_finite, default=1.0, metavar="X")
    group.add_argument("--min-capacity", type=int, default=4, metavar="N")
    group.add_argument("--noisy-gate-policy", metavar="NAME", help="Jitter, RSample or None")
    group.add_argument("--drop-tokens", type=_switch, default=True, metavar="BOOL")
    group.add_argument("--use-rts", type=_switch, default=True, metavar="BOOL")
    group.add_argument("--use-tutel", type=_switch, default=False, metavar="BOOL")
    group.add_argument("--use-residual", type=_switch, default=False, metavar="BOOL")
    group.add_argument(
        "--enable-expert-tensor-parallelism", type=_switch, default=False, metavar="BOOL"
    )
    group.add_argument("--moe-loss-coeff", type=_finite, metavar="X", help="of l_aux, in your loss")
    group.add_argument(
        "--expert-interval", type=count, metavar="N", help="every Nth layer is sparse"
    )


def _finite(text: str) -> float:
    number = float(text)  # argparse says what is no number
    if not math.isfinite(number):
        raise ArgumentTypeError(f"takes a finite number, got '{text}'")
    return number


def translate_moe(options: Namespace, found: Translation) -> None:
    """Add the flags and notes of DeepSpeed's mixture-of-experts arguments.

    Args:
        options: Parsed arguments.
        found: Where flags and notes go.

    Raises:
        ConfigError: If experts cannot be shared by the expert-parallel ranks.
    """
    if options.num_experts is None:
        return
    experts, ranks = options.num_experts, options.ep_size or 1
    if experts % ranks:
        raise ConfigError(
            f"{experts} experts cannot be shared evenly by --ep-size {ranks}. DeepSpeed refuses it "
            "too; change either."
        )
    found.set("--num-experts", experts)
    found.set("--expert-model-parallel-size", ranks)
    if not options.enable_expert_tensor_parallelism:
        found.set("--expert-tensor-parallel-size", 1)
        found.note(
            "enable_expert_tensor_parallelism",
            "Off: every expert lives whole on one rank. DeepSpeed holds a copy on each tensor-"
            "parallel rank; here other experts are there instead, so that EP counts those ranks.",
        )
    if options.k != 1:
        found.note("k", f"Top-{options.k} has no equal: Switch sends a token to one expert.")
    _translate_capacity(options, found)
    _translate_routing(options, found)


def _translate_capacity(options: Namespace, found: Translation) -> None:
    if not options.drop_tokens:
        found.set("--moe-expert-capacity-factor", -1)
        found.set("--switch-eval-capacity-factor", -1)
        found.set("--switch-dispatch", "packed")
        return
    found.set("--moe-expert-capacity-factor", options.capacity_factor)
    found.set("--switch-eval-capacity-factor", options.eval_capacity_factor)
    found.set("--switch-min-capacity", options.min_capacity)
    found.set("--switch-capacity-rounding", "ceil")
    found.note(
        "capacity_factor",
        "DeepSpeed counts capacity over the tokens of one rank, here it is counted over a micro-"
        "batch, whatever ranks hold it (--switch-capacity-group). Without tensor and context "
        "parallelism that is the same.",
    )


def _translate_routing(options: Namespace, found: Translation) -> None:
    if options.use_rts and options.drop_tokens:
        found.note(
            "use_rts",
            "Random selection of the tokens that keep a slot has no equal: the first come are "
            "kept, as in Switch (--switch-drop-order).",
        )
    policy = (options.noisy_gate_policy or "None").lower()
    if policy == "jitter":
        found.set("--moe-input-jitter-eps", 0.01)
    elif policy != "none":
        found.note("noisy_gate_policy", f"{options.noisy_gate_policy} has no equal; jitter has.")
    if options.use_residual:
        found.note("use_residual", "There is no dense branch beside the experts (PR-MoE).")
    if options.use_tutel:
        found.note("use_tutel", "Dispatch is the project's own: see --switch-dispatch.")
    if options.moe_loss_coeff is None:
        found.note(
            "l_aux",
            "Your loss adds l_aux with a factor of its own: give it as --moe-aux-loss-coeff; the "
            "default is 0.01, and balanced routing has the value 1 in both systems.",
        )
    else:
        found.set("--moe-aux-loss-coeff", options.moe_loss_coeff)
    if options.expert_interval is None:
        found.note("MoE", "Which layers are sparse stands in the model's code: --moe-layer-freq.")
    elif options.expert_interval != 2:
        dense = ",".join(["0"] * (options.expert_interval - 1) + ["1"])
        found.note(
            "expert_interval",
            f"Give --moe-layer-freq '[{dense}]*N' with N = layers / {options.expert_interval}.",
        )


def _switch(text: str) -> bool:
    if text.lower() in _SWITCH_ON:
        return True
    if text.lower() in _SWITCH_OFF:
        return False
    raise ValueError(text)
