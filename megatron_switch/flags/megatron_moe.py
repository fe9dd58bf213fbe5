"""What becomes of Megatron's own mixture-of-experts flags when a Switch model is trained.

Every flag of the pinned Megatron that speaks of experts, routers or routing stands in
:data:`FLAGS`, in one of four classes. The table is data: ``docs/flags.md`` is printed from it, the
command line is checked against it, and a test compares it with Megatron's real parser, so that a
flag which a newer Megatron brings cannot be ignored quietly.

honoured
    Means with Switch what it means in Megatron, or what its note says.
fixed
    Switch leaves no choice: the default is the accepted value, and any other is an error.
refused
    Asks for something that a Switch layer does not do: setting it is an error.
harmless
    Tunes something that a Switch layer does not have. Accepted, with a warning.

The checks are made on values, not on which flags were typed, because values also come from
``--switch-model`` files and checkpoints; they are made on the parsed namespace, before Megatron
validates and changes it.
"""

from argparse import Namespace
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import attribute_of

FlagKind = Literal["honoured", "fixed", "refused", "harmless"]

NAME_PARTS = ("moe", "expert", "router", "routing")
"""A flag of Megatron belongs into :data:`FLAGS` when one of these is part of its name."""


@dataclass(frozen=True)
class FlagClass:
    """How Switch treats one flag of Megatron."""

    kind: FlagKind
    reason: str
    """Why, or what it means with Switch; a sentence that stands on its own."""
    accepted: tuple[object, ...] = ()
    """The parsed values that are allowed, the default first; empty where all are."""


def _honoured(reason: str, *accepted: object) -> FlagClass:
    return FlagClass("honoured", reason, accepted)


def _fixed(value: object, reason: str) -> FlagClass:
    return FlagClass("fixed", reason, (value,))


def _refused(default: object, reason: str, *same: object) -> FlagClass:
    return FlagClass("refused", reason, (default, *same))


def _harmless(reason: str) -> FlagClass:
    return FlagClass("harmless", reason)


_SHARED = "Switch layers have no shared expert; see --moe-shared-expert-intermediate-size."
_FLEX = "Tunes Megatron's flex dispatcher; Switch has its own, see --switch-dispatch."
_BIAS = "Read only with a router bias, which Switch does not have."
_STASH = "Read only with --moe-paged-stash, which is refused."
_ENGINE = "Read by Megatron's inference engine only; `megatron-switch generate` has its own loop."
_TRACE = "Read together with --moe-routing-trace-path."

FLAGS: dict[str, FlagClass] = {
    # The model
    "--num-experts": _honoured("Experts per Switch layer; without it the model is dense."),
    "--moe-layer-freq": _honoured(
        "Which layers are Switch layers. The default makes every second one a Switch layer, "
        "beginning with the second."
    ),
    "--moe-ffn-hidden-size": _honoured("Hidden size of an expert; --ffn-hidden-size by default."),
    "--moe-shared-expert-intermediate-size": _refused(
        None,
        "A Switch layer has no expert that sees every token. Give dense layers with "
        "--moe-layer-freq instead.",
    ),
    "--moe-shared-expert-gate": _harmless(_SHARED),
    "--moe-shared-expert-overlap": _harmless(_SHARED),
    "--moe-shared-expert-glu-interleave-size": _harmless(_SHARED),
    "--use-grouped-gemm-for-shared-expert": _harmless(_SHARED),
    "--moe-latent-size": _refused(None, "Experts work at the model's width (--hidden-size)."),
    "--moe-mlp-glu-interleave-size": _refused(
        None, "Expert weights keep gate and linear half apart, so that checkpoints move."
    ),
    "--moe-use-upcycling": _refused(
        False, "The conversion of Megatron-Core 0.19.2 stops before it has loaded the dense model."
    ),
    "--moe-upcycling-granularity": _harmless("Read only with --moe-use-upcycling."),
    # The router
    "--moe-router-topk": _fixed(1, "Switch sends every token to one expert."),
    "--moe-router-pre-softmax": _fixed(
        True, "The gate is the chosen expert's probability among all experts."
    ),
    "--moe-router-score-function": _fixed("softmax", "The gate is a probability."),
    "--moe-router-dtype": _fixed(
        "fp32", "Logits, softmax and argmax are float32 whatever the model's precision."
    ),
    "--moe-router-topk-scaling-factor": _refused(None, "The gate is the probability, unscaled."),
    "--moe-router-num-groups": _refused(None, "Every token chooses among all experts."),
    "--moe-router-group-topk": _refused(None, "Every token chooses among all experts."),
    "--moe-router-enable-expert-bias": _refused(
        False, "The router has no bias; balance comes from --moe-aux-loss-coeff."
    ),
    "--moe-router-bias-update-rate": _harmless(_BIAS),
    "--moe-router-quantile-balancing-ema": _harmless(_BIAS),
    "--moe-router-load-balancing-type": _honoured(
        "aux_loss is Switch's balancing loss, over each micro-batch, or over each sequence with "
        "--switch-capacity-group sequence; none trains without it.",
        "aux_loss",
        "none",
    ),
    "--moe-aux-loss-coeff": _honoured("One value, 0.01 by default; the raw loss is logged too."),
    "--moe-z-loss-coeff": _honoured("0 by default; the raw z-loss is logged all the same."),
    "--moe-input-jitter-eps": _honoured(
        "Multiplies the router's float32 input, in training only; the noise depends on the "
        "token's position, not on the layout."
    ),
    "--moe-router-force-load-balancing": _honoured(
        "Random logits instead of the router's, for benchmarks."
    ),
    "--moe-router-force-biased": _refused(
        None, "For a balanced benchmark use --moe-router-force-load-balancing."
    ),
    "--moe-router-fusion": _harmless("Fuses Megatron's top-k routing, which Switch does not run."),
    "--moe-enable-routing-replay": _refused(
        False, "Tokens are routed anew in every pass; nothing is replayed."
    ),
    "--moe-router-padding-for-quantization": _refused(
        False, "Transformer Engine's experts pad their own rows where a format needs it."
    ),
    "--moe-router-padding-for-fp8": _refused(
        False, "Transformer Engine's experts pad their own rows where a format needs it."
    ),
    # Capacity
    "--moe-expert-capacity-factor": _honoured(
        "Capacity factor while training, 1.25 by default; negative drops no token. Evaluation has "
        "--switch-eval-capacity-factor."
    ),
    "--moe-pad-expert-input-to-capacity": _honoured("Means --switch-dispatch padded."),
    "--moe-token-drop-policy": _fixed(
        "position",
        "Who keeps a slot is said by --switch-drop-order: first_come is what position stands for, "
        "probability is probs.",
    ),
    "--moe-expert-rank-capacity-factor": _refused(
        None, "Capacity is counted per expert: --moe-expert-capacity-factor."
    ),
    "--moe-pad-experts-for-cuda-graph-inference": _harmless(_ENGINE),
    # Dispatch and experts
    "--moe-token-dispatcher-type": _fixed(
        "alltoall", "Switch has its own dispatcher; its modes are those of --switch-dispatch."
    ),
    "--moe-enable-deepep": _refused(
        False, "Switch has its own dispatcher; its modes are those of --switch-dispatch."
    ),
    "--moe-flex-dispatcher-backend": _harmless(_FLEX),
    "--moe-flex-dispatcher-num-sms": _harmless(_FLEX),
    "--moe-deepep-num-sms": _harmless(_FLEX),
    "--moe-hybridep-num-sms": _harmless(_FLEX),
    "--moe-hybridep-num-sms-preprocessing": _harmless(_FLEX),
    "--moe-hybridep-num-blocks-permute": _harmless(_FLEX),
    "--moe-hybridep-num-blocks-unpermute": _harmless(_FLEX),
    "--moe-hybridep-pad-uneven-dispatch-inputs": _harmless(_FLEX),
    "--moe-permute-fusion-into-hybridep": _harmless(_FLEX),
    "--moe-ncclep-static-shape": _harmless(_FLEX),
    "--moe-ncclep-zero-copy": _harmless(_FLEX),
    "--moe-permute-fusion": _harmless(
        "Fuses Megatron's permutation of a token map, which Switch does not build."
    ),
    "--moe-grouped-gemm": _honoured(
        "On with Transformer Engine's experts; ours are always grouped, and do not read it."
    ),
    "--moe-single-grouped-weight": _refused(
        False, "Every expert keeps weights of its own, so that checkpoints move."
    ),
    "--moe-single-grouped-bias": _refused(
        False, "Every expert keeps weights of its own, so that checkpoints move."
    ),
    "--moe-apply-probs-on-input": _refused(
        False, "The gate multiplies the expert's hidden activation."
    ),
    "--moe-layer-recompute": _honoured(
        "The old name of --recompute-granularity selective --recompute-modules moe."
    ),
    "--moe-paged-stash": _refused(
        False, "For less memory use --recompute-granularity selective --recompute-modules moe."
    ),
    "--moe-paged-stash-page-size": _harmless(_STASH),
    "--moe-paged-stash-buffer-size-factor-cuda": _harmless(_STASH),
    "--moe-paged-stash-buffer-size-factor-cpu": _harmless(_STASH),
    "--overlap-moe-expert-parallel-comm": _refused(
        False,
        "Splits Megatron's own layer into stages. For overlap of exchange and compute use "
        "--switch-overlap-chunks.",
    ),
    "--overlap-dispatch-backward-with-experts-wgrad": _refused(
        False,
        "Splits Megatron's own layer into stages. For overlap of exchange and compute use "
        "--switch-overlap-chunks.",
    ),
    # Layout
    "--expert-model-parallel-size": _honoured("Ranks over which the experts are spread."),
    "--expert-tensor-parallel-size": _honoured(
        "Ranks that share each expert; --tensor-model-parallel-size by default."
    ),
    "--expert-tensor-parallel-num-weight-shards": _refused(
        None, "An expert is cut into --expert-tensor-parallel-size pieces and no further."
    ),
    # Logging
    "--moe-per-layer-logging": _honoured("Per-layer values in TensorBoard and W&B."),
    "--save-tokens-per-expert-interval": _honoured(
        "Tokens per local expert and micro-batch, as JSON lines under --save."
    ),
    "--moe-routing-trace-path": _honoured(
        "Every token's expert, as JSON lines; rows are batch-major (all of sequence 0 first)."
    ),
    "--moe-routing-trace-max-training-iters": _honoured(_TRACE),
    "--moe-routing-trace-capture-logits": _honoured(_TRACE),
    "--moe-routing-trace-capture-hidden-states": _honoured(_TRACE),
    "--moe-routing-trace-dump-weights": _honoured(_TRACE),
    # Megatron's inference engine and reinforcement learning
    "--inference-moe-disable-fused-quant-kernels": _harmless(_ENGINE),
    "--inference-moe-token-dispatcher-type": _harmless(_ENGINE),
    "--inference-dynamic-batching-prefix-caching-routing-alpha": _harmless(_ENGINE),
    "--rl-inference-expert-model-parallel-size": _harmless(_ENGINE),
    "--rl-inference-expert-tensor-model-parallel-size": _harmless(_ENGINE),
    # Not of the family by name
    "--mtp-num-layers": _refused(
        None, "Megatron builds its own expert layers for multi-token prediction.", 0
    ),
}

_LISTS_OF_ONE = {"--moe-aux-loss-coeff", "--moe-router-load-balancing-type"}
"""Flags that take several values in Megatron, which adds up several balancing losses."""


def fixed_defaults() -> dict[str, object]:
    """Return the defaults, by attribute, that every fixed flag must have."""
    return {
        attribute_of(flag): rule.accepted[0] for flag, rule in FLAGS.items() if rule.kind == "fixed"
    }


def check_megatron_flags(args: Namespace) -> None:
    """Refuse values of Megatron's flags that a Switch layer could not follow.

    Without ``--num-experts`` the model is dense, and nothing is checked.

    Args:
        args: Parsed command line, before Megatron's own validation.

    Raises:
        ConfigError: A flag has a value that is not accepted; all such flags are named.
    """
    if not args.num_experts:
        return
    problems = [
        problem
        for flag, rule in FLAGS.items()
        if (problem := _problem(flag, rule, getattr(args, attribute_of(flag))))
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def ignored_flags(explicit: Collection[str]) -> dict[str, str]:
    """Return the flags that were given although Switch has no use for them, with the reason.

    Args:
        explicit: Attributes of the namespace whose flag stood on the command line.
    """
    return {
        flag: rule.reason
        for flag, rule in FLAGS.items()
        if rule.kind == "harmless" and attribute_of(flag) in explicit
    }


def _problem(flag: str, rule: FlagClass, value: object) -> str:
    if flag in _LISTS_OF_ONE and isinstance(value, list):
        if len(value) != 1:
            given = " ".join(map(str, value))
            return f"{flag} takes one value with Switch, got {given}. {rule.reason}"
        value = value[0]
    if not rule.accepted or any(value == wanted for wanted in rule.accepted):
        return ""
    if rule.accepted[0] is None or rule.accepted[0] is False:
        given = "" if value is True else f" {value}"
        return f"{flag}{given} cannot be used with Switch layers. {rule.reason} Leave it out."
    allowed = " or ".join(map(str, rule.accepted))
    return f"{flag} must be {allowed} with Switch layers, got {value}. {rule.reason}"
