"""Checks of a command line that need several flags, before anything is built."""

from argparse import Namespace
from typing import Literal

from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS
from megatron.core.transformer.enums import AttnBackend

from megatron_switch.architecture.layer_pattern import sparse_layers
from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flag_name
from megatron_switch.flags.known_flags import check_megatron_flags, flags_without_effect
from megatron_switch.flags.traits import Condition
from megatron_switch.training.arguments.data_flags import reads_pairs
from megatron_switch.training.arguments.parser import CommandLine
from megatron_switch.training.arguments.t5 import check_t5
from megatron_switch.training.preflight.data import check_data_flags
from megatron_switch.training.preflight.layout import check_buffer_memory
from megatron_switch.upstream.version import check_version

_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
)
_OWN_OPTIMIZERS = ("adam", "sgd")


def check_before_megatron(
    line: CommandLine, switch: SwitchConfig, device: Literal["cuda", "cpu"]
) -> tuple[str, ...]:
    """Refuse what cannot work, and return what is worth a line on the screen.

    Raises:
        ConfigError: A flag or combination that cannot work.
        DataError: No training data, or no tokenizer.
        UpstreamError: Another Megatron-Core is installed than this code was checked against.
    """
    check_version()
    args = line.args
    check_data_flags(args)
    _check_required(args)
    _check_batch_growth(args)
    _check_model(args)
    _check_combinations(args)
    _check_savings(args)
    _check_optimizer(args)
    if args.switch_arch == "t5":
        check_t5(args)
    idle = flags_without_effect(line.explicit, failed_conditions(args, switch))
    notes = [f"{flag} has no effect: {why}" for flag, why in idle.items()]
    notes += _check_format(args)
    if args.num_experts:
        notes += _check_nonfinite(args, switch)
        check_megatron_flags(args)
        check_buffer_memory(args, switch, device)
        if args.transformer_impl == "transformer_engine" and switch.expert_dropout:
            notes.append(
                f"--switch-expert-dropout {switch.expert_dropout}: Transformer Engine's experts "
                "have no dropout, so the experts are plain torch's, which is slower."
            )
        if switch.drop_order == "probability" and not _never_drops(args, switch):
            notes.append(
                "--switch-drop-order probability: a later token can take the slot of an earlier "
                "one, so this decoder sees the future while training."
            )
    return tuple(notes)


def check_schedule(args: Namespace) -> None:
    """Refuse a schedule of the learning rate that Megatron's own class asserts against.

    Args:
        args: Validated arguments.

    Raises:
        ConfigError: Warm-up fills the whole schedule, rates are in the wrong order, or the decay of
            ``--lr-decay-style WSD`` has no length.
    """
    if args.skip_train:
        return
    unit = "iters" if args.train_iters else "samples"
    length = getattr(args, f"lr_decay_{unit}")
    length = getattr(args, f"train_{unit}") if length is None else length
    if args.lr_warmup_fraction is not None:
        given, warm_up = "fraction", args.lr_warmup_fraction * length
    else:
        given, warm_up = unit, getattr(args, f"lr_warmup_{unit}")
    if warm_up >= length:
        raise ConfigError(
            f"Warm-up must end before the schedule does, but --lr-warmup-{given} "
            f"{getattr(args, f'lr_warmup_{given}')} leaves nothing of its {length} {unit} "
            f"(--lr-decay-{unit}, else --train-{unit}). Shorten the warm-up, or train longer."
        )
    for name in ("min_lr", "lr_warmup_init"):
        low = getattr(args, name)
        if low > args.lr:
            raise ConfigError(
                f"The learning rate does not go above --lr, which is {args.lr:g}, but "
                f"{flag_name(name)} is {low:g}. Lower it, or raise --lr."
            )
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        raise ConfigError(
            "--lr-decay-style WSD keeps the learning rate and decays it at the end, but how "
            f"long that takes is not given. Add --lr-wsd-decay-{unit}."
        )


def failed_conditions(args: Namespace, switch: SwitchConfig) -> dict[Condition, str]:
    """Return the conditions of flags that do not hold in this run, with the reason."""
    failed: dict[Condition, str] = {}
    if args.switch_arch != "t5":
        failed["t5"] = "it is for --switch-arch t5."
    elif reads_pairs(args):
        failed["spans"] = "the data are pairs of texts."
    if not args.num_experts:
        failed["experts"] = "without --num-experts every layer is dense."
    elif switch.capacity is not None:
        failed["factor"] = f"--switch-capacity {switch.capacity} is absolute."
    elif _never_drops(args, switch):
        failed["drops"] = "both capacity factors are negative: no drops."
    if not (args.switch_metrics_file or args.switch_run_dir or args.tensorboard_dir):
        failed["metrics"] = (
            "there is no --switch-metrics-file, --switch-run-dir or --tensorboard-dir."
        )
    gated = args.swiglu or args.quick_geglu or args.switch_activation == "gated-gelu"
    if not gated:
        failed["gated"] = "the units of the model are not gated (--swiglu, --quick-geglu)."
    if not args.group_query_attention:
        failed["grouped queries"] = "there is no --group-query-attention."
    if not args.use_rope_scaling:
        failed["rope scaling"] = "there is no --use-rope-scaling."
    if args.save is None:
        failed["save"] = "there is no --save and no --switch-run-dir."
    return failed


def _check_required(args: Namespace) -> None:
    missing = [flag_name(name) for name in _REQUIRED if getattr(args, name) is None]
    if not args.skip_train:
        missing += [] if args.lr is not None else ["--lr"]
        missing += [] if args.train_iters or args.train_samples else ["--train-iters"]
    if missing:
        raise ConfigError(
            f"A model and its training need more flags than were given: {', '.join(missing)}. Add "
            "them, or name a JSON file that holds the model's with --switch-model."
        )
    if args.save is not None and args.save_interval is None:
        raise ConfigError(
            f"--save {args.save} says where checkpoints go, but not how often one is written. Add "
            "--save-interval with a number of iterations."
        )


def _check_format(args: Namespace) -> list[str]:
    """Refuse to save checkpoints that no command of this program can load."""
    if args.save is None or args.ckpt_format == "torch_dist":
        return []
    if args.use_megatron_fsdp:  # which has no other format
        return [
            f"--ckpt-format {args.ckpt_format}: Megatron-FSDP's own format. Its checkpoints "
            "cannot be resumed, converted or resharded by this program."
        ]
    raise ConfigError(
        f"--ckpt-format {args.ckpt_format} would save checkpoints that this program cannot load, "
        "resume or convert. Use --ckpt-format torch_dist, the default."
    )


def _check_batch_growth(args: Namespace) -> None:
    """Refuse a flag that Megatron 0.19.2 reads and leaves without effect."""
    if args.rampup_batch_size is not None:
        values = " ".join(map(str, args.rampup_batch_size))
        raise ConfigError(
            f"Megatron no longer grows the batch by --rampup-batch-size, got {values}: every batch "
            "would be of full size. Use --step-batch-size-schedule."
        )


def _check_model(args: Namespace) -> None:
    """Refuse what Megatron finds out only when a tensor has the wrong shape."""
    heads, groups = args.num_attention_heads, args.num_query_groups
    if args.group_query_attention and heads % groups:
        raise ConfigError(
            f"Query groups share the attention heads evenly, but --num-attention-heads is {heads} "
            f"and --num-query-groups {groups}. Change either."
        )
    if args.swiglu and args.ffn_hidden_size is None and args.hidden_size < 24:
        raise ConfigError(
            "With --swiglu the MLP is 8/3 of --hidden-size wide, rounded down to a multiple of 64: "
            f"nothing for {args.hidden_size}. Give --ffn-hidden-size."
        )
    if args.num_experts:
        sparse_layers(args.moe_layer_freq, args.num_layers)  # refuses what is no pattern


def _check_combinations(args: Namespace) -> None:
    """Refuse what ends in a traceback of Megatron 0.19.2, after minutes where a model is large."""
    if args.init_method_xavier_uniform:
        raise ConfigError(
            "Megatron 0.19.2 cannot build a model with --init-method-xavier-uniform. Leave it out; "
            "--init-method-std or --switch-init-scale set the scale of initial weights."
        )
    if args.attention_backend == AttnBackend.local:
        raise ConfigError(
            "--attention-backend local is for models of --spec, which Switch has none of. Leave it "
            "out: --transformer-impl local has local attention."
        )
    half = args.bf16 or args.fp16
    if args.fp32_residual_connection and half and args.transformer_impl == "local":
        raise ConfigError(
            "--fp32-residual-connection gives norms float32 inputs and 16-bit weights, which "
            "only Transformer Engine's norms take. Leave it out, or use --transformer-impl "
            "transformer_engine."
        )
    if args.multiple_validation_sets and not args.full_validation:
        raise ConfigError(
            "Several validation sets are read to their ends: --multiple-validation-sets needs "
            "--full-validation. Add it."
        )
    if args.non_persistent_save_interval and args.non_persistent_ckpt_type is None:
        raise ConfigError(
            f"--non-persistent-save-interval {args.non_persistent_save_interval} needs the kind of "
            "its checkpoints. Add --non-persistent-ckpt-type global, or leave it out."
        )
    width = args.kv_channels or args.hidden_size // args.num_attention_heads
    rotated = int(width * args.rotary_percent)
    if args.position_embedding_type == "rope" and rotated % 2:
        raise ConfigError(
            f"Rotary positions turn pairs of channels, but {rotated} of a head's are turned "
            f"(--kv-channels {width}, --rotary-percent {args.rotary_percent:g}). Make them even."
        )


def _check_savings(args: Namespace) -> None:
    """Refuse a way to save memory that breaks while the model is built."""
    stages = args.pipeline_model_parallel_size
    if args.use_megatron_fsdp and stages > 1:
        raise ConfigError(
            "Megatron-FSDP has no pipeline stages: its mesh of ranks has axes for data and "
            "tensor parallelism only, got --use-megatron-fsdp and "
            f"--pipeline-model-parallel-size {stages}. Give 1, or keep "
            "--use-distributed-optimizer alone."
        )
    if args.use_megatron_fsdp and args.optimizer_cpu_offload:
        raise ConfigError(
            "Megatron's offloading optimizer cannot copy the gradients of Megatron-FSDP, which are "
            "cut, to the host: got --use-megatron-fsdp and --optimizer-cpu-offload. Leave either "
            "out; --use-distributed-optimizer goes with the second."
        )


def _check_optimizer(args: Namespace) -> None:
    """Refuse an optimizer whose package is missing, which Megatron imports late."""
    if args.optimizer not in _OWN_OPTIMIZERS and not HAVE_EMERGING_OPTIMIZERS:
        raise ConfigError(
            f"--optimizer {args.optimizer} is part of the package emerging-optimizers, which does "
            "not import here. Install it (pip install emerging-optimizers), or use --optimizer "
            "adam."
        )


def _never_drops(args: Namespace, switch: SwitchConfig) -> bool:
    factors = (args.moe_expert_capacity_factor, switch.eval_capacity_factor)
    return switch.capacity is None and all(factor is None or factor < 0 for factor in factors)


def _check_nonfinite(args: Namespace, switch: SwitchConfig) -> list[str]:
    """Return notes on ``--switch-nonfinite`` where whole iterations are captured."""
    if args.cuda_graph_impl != "full_iteration" or switch.nonfinite == "ignore":
        return []
    if switch.nonfinite == "skip":
        raise ConfigError(
            "A step that is captured whole in a CUDA graph cannot be left out: got "
            "--switch-nonfinite skip and --cuda-graph-impl full_iteration. Change either."
        )
    return [
        "Router logits are not checked in iterations that are captured whole (--cuda-graph-impl "
        "full_iteration); this is --switch-nonfinite ignore."
    ]
