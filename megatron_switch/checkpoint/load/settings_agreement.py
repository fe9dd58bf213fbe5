"""Compare the settings stored in a checkpoint with those of the run that loads it.

Megatron stores its whole argument namespace in a checkpoint and compares three of the values on
load. Other differences fail later with a shape or an assertion, or silently change what the model
computes. Here every difference that matters is an error that lists flag, stored value and current
value:

* another model: everything that decides which function Megatron's layers compute;
* other Switch semantics: capacity, drop order, losses, jitter, unless overridden;
* another learning rate schedule, unless a flag says which of the two to take;
* optimizer state that this run's optimizer cannot read in this layout.

Layout, precision of the run, logging, data and intervals are free to change. Which flag is of which
kind stands with the flag (:data:`megatron_switch.flags.known_flags.KNOWN_FLAGS`).

Pure functions of values: the caller reads the stored common state
(:func:`megatron_switch.checkpoint.formats.dist_metadata.read_common_state`) and passes Megatron's
argument namespace *after* ``validate_args`` has filled in what follows from other flags.
"""

from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_switch.architecture.layer_pattern import sparse_layers
from megatron_switch.checkpoint.load.lr_agreement import check_schedule, keep_schedule
from megatron_switch.config import switch_traits
from megatron_switch.errors import CheckpointError
from megatron_switch.flags.known_flags import KNOWN_FLAGS, flags_with, shown_flag

UNTRAINED = "switch_untrained"
"""Key of the common state of a model whose experts no run has trained yet."""

_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """One setting that a checkpoint and this run disagree about."""

    flag: str
    stored: Any
    current: Any

    def __str__(self) -> str:
        """Return one line for a message."""
        return f"{self.flag}: {self.stored} in the checkpoint, {self.current} now"


def check_resume(
    common_state: Mapping[str, Any],
    args: Namespace,
    *,
    model: Collection[str],
    is_release: bool = False,
) -> tuple[str, ...]:
    """Raise unless a run with ``args`` can continue from a checkpoint.

    Args:
        common_state: What ``read_common_state`` returned.
        args: Megatron's validated arguments of this run, ``--switch-*`` ones included.
        model: Attributes of the arguments whose other value is another model.
        is_release: The checkpoint holds weights only; nothing but the model is compared.

    Returns:
        Notes for the user, one message per element; none of them stops the run.

    Raises:
        CheckpointError: They do not fit; the message lists every difference.
    """
    stored = common_state.get("args")
    if stored is None:
        return (
            "The checkpoint stores no arguments, so its model, schedule and Switch settings "
            "could not be compared with this run's.",
        )
    check_model(stored, args, model)
    messages = [
        *_not_saved(stored, args, is_release=is_release),
        *check_switch_settings(stored, args, is_untrained=bool(common_state.get(UNTRAINED))),
        *_batch_notes(stored, args),
        *([] if is_release or args.finetune else _data_notes(stored, args)),
    ]
    if not (is_release or args.finetune or args.no_load_optim):
        check_optimizer_state(common_state, args)
        schedule = common_state.get("opt_param_scheduler")
        check_schedule(schedule, stored, args)
        keep_schedule(schedule, stored, args)
    elif args.no_load_optim and not (is_release or args.finetune):
        messages.append(
            "The optimizer's moments and the learning-rate schedule start anew, warm-up included "
            "(--no-load-optim); iterations and samples are counted on."
        )
    return tuple(messages)


def check_model(stored: Namespace, args: Namespace, model: Collection[str]) -> None:
    """Raise when the stored arguments describe another model than the current ones.

    Args:
        stored: Arguments of the checkpoint.
        args: Arguments of this run.
        model: Attributes of which another value is another model.

    Raises:
        CheckpointError: With one line for each setting that differs.
    """
    derived = {
        "switch_arch": (_of(stored, "switch_arch", "gpt"), args.switch_arch),
        "switch_activation": (_activation(stored), _activation(args)),
        "switch_decoder_layer_freq": (
            _of(stored, "switch_decoder_layer_freq"),
            args.switch_decoder_layer_freq,
        ),
        "num_experts": (_of(stored, "num_experts") or None, args.num_experts or None),
        "moe_layer_freq": (_sparse_layers(stored), _sparse_layers(args)),
        "num_query_groups": _query_groups(stored, args),
    }
    apart = set(derived)
    if not (args.num_experts or _of(stored, "num_experts")):
        apart |= {name for name, each in KNOWN_FLAGS.items() if "experts" in each.needs}
    if _of(args, "position_embedding_type") != "learned_absolute":
        apart.add("max_position_embeddings")
    if _of(args, "padded_vocab_size") is None:  # before the tokenizer is built
        apart.add("padded_vocab_size")
    if not _of(args, "use_rope_scaling"):
        apart.add("rope_scaling_factor")
    names = sorted(set(model) - apart)
    differences = _differences(names, stored, args) + [
        Difference(shown_flag(name), old, new) for name, (old, new) in derived.items() if old != new
    ]
    if differences:
        raise CheckpointError(
            f"The checkpoint is of another model:{_lines(differences)}\n"
            "Give these flags the checkpoint's values (--use-checkpoint-args takes most of them "
            "from it), or load another checkpoint with --load."
        )


def check_switch_settings(
    stored: Namespace, args: Namespace, *, is_untrained: bool = False
) -> tuple[str, ...]:
    """Compare everything that decides which tokens an expert computes, and with what losses.

    A setting that the checkpoint does not have is no difference: stock Megatron writes none
    of ours, and an older release of this program fewer. They are named in one message, with
    the current values. For a stock checkpoint, Megatron's own flags that carry Switch
    semantics are named there too instead of being an error. Neither is a difference from a
    model that no run has trained with its settings.

    Returns:
        Messages, empty when every setting is stored and equal.

    Raises:
        CheckpointError: A stored setting differs and ``--switch-override-checkpoint`` is off.
    """
    if not args.num_experts:
        return ()
    names = flags_with("overridable")
    switch = [name for name in names if name in switch_traits()]
    missing = [name for name in switch if not hasattr(stored, name)]
    differences = _differences(switch, stored, args)
    megatron = _differences([name for name in names if name not in switch], stored, args)
    is_stock = _is_stock(stored)
    if not is_stock:
        differences += megatron
    if differences and not (is_untrained or args.switch_override_checkpoint):
        raise CheckpointError(
            f"Switch settings differ from the checkpoint's:{_lines(differences)}\n"
            "Give these flags the checkpoint's values, or pass --switch-override-checkpoint to "
            "continue with the new ones."
        )
    messages = []
    if differences:
        messages.append(
            "Continuing with Switch settings other than the checkpoint's:" + _lines(differences)
        )
    if missing:
        listing = ", ".join(f"{shown_flag(name)} {getattr(args, name)}" for name in missing)
        author = "stock Megatron" if is_stock else "an older release"
        messages.append(
            f"The checkpoint was written by {author} and does not say what it was trained with. "
            f"This run uses: {listing}." + (_lines(megatron) if is_stock else "")
        )
    return tuple(messages)


def _not_saved(stored: Namespace, args: Namespace, *, is_release: bool) -> list[str]:
    """Do not load what the checkpoint was saved without; return a note for each."""
    notes = []
    for part, name in (("optim", "optimizer state"), ("rng", "states of random generators")):
        loads = not (is_release or args.finetune or getattr(args, f"no_load_{part}"))
        if loads and _of(stored, f"no_save_{part}"):
            setattr(args, f"no_load_{part}", True)
            notes.append(f"The checkpoint has no {name}: it was saved with --no-save-{part}.")
    return notes


def _batch_notes(stored: Namespace, args: Namespace) -> list[str]:
    """Return a note where another micro-batch size changes the capacity groups."""
    sizes = _differences(["micro_batch_size"], stored, args)
    counted = args.num_experts and _of(args, "switch_capacity_group") == "microbatch"
    if not (sizes and counted):
        return []
    return [
        f"Capacity is counted over each micro-batch, and its size has changed:{_lines(sizes)}\n"
        "Other tokens are dropped than before."
    ]


def _data_notes(stored: Namespace, args: Namespace) -> list[str]:
    """Return a note where the run continues on other data than it was trained on."""
    names = [
        name for name, each in KNOWN_FLAGS.items() if each.identity and each.on_resume == "free"
    ]
    changed = _differences(names, stored, args)
    return [f"Training continues with other data or another seed:{_lines(changed)}"] * bool(changed)


def check_optimizer_state(common_state: Mapping[str, Any], args: Namespace) -> None:
    """Raise when this run's optimizer cannot read the stored optimizer state.

    The distributed optimizer and the plain one keep different records, and so does the plain
    one in full and in mixed precision. State in ``dp_reshardable`` form lies in the order of
    one layout's gradient buckets; only the data-parallel size may change.

    Raises:
        CheckpointError: Naming the flag that makes the state readable.
    """
    stored = common_state["args"]
    way_out = "or pass --no-load-optim to start optimizer and learning-rate schedule anew."
    settings = _differences(flags_with("optimizer"), stored, args)
    if settings:
        raise CheckpointError(
            f"The optimizer keeps the settings it was saved with, and these flags ask for "
            f"others:{_lines(settings)}\nGive them the checkpoint's values, {way_out}"
        )
    if bool(_of(stored, "use_distributed_optimizer")) != bool(args.use_distributed_optimizer):
        was = "with" if _of(stored, "use_distributed_optimizer") else "without"
        raise CheckpointError(
            f"The checkpoint was saved {was} --use-distributed-optimizer, and its optimizer state "
            f"can only be loaded that way. Set the flag as it was, {way_out}"
        )
    old, new = _precision(stored), _precision(args)
    if old != new and "fp32" in (old, new) and not args.use_distributed_optimizer:
        raise CheckpointError(
            f"The optimizer state was saved in {old} and this run is in {new}. Only "
            "--use-distributed-optimizer keeps state that can be loaded in either. Set the "
            f"precision as it was, {way_out}"
        )
    form = (common_state.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if form == "dp_reshardable":
        _check_bucket_order(stored, args, way_out)


def _check_bucket_order(stored: Namespace, args: Namespace, way_out: str) -> None:
    """Raise unless this run has the very buffers of which the state is an image.

    Megatron compares their sizes only. Experts that are stored in another order have the
    same size, and would silently exchange their moments.
    """
    intro = (
        "The optimizer state is stored in dp_reshardable form, in the order of the buffers of the "
        "run that saved it"
    )
    if args.num_experts and _is_stock(stored):
        raise CheckpointError(
            f"{intro}, and the experts of stock Megatron have another order than this program's. "
            "Let stock Megatron load the checkpoint and save it with "
            f"--dist-ckpt-optim-fully-reshardable, {way_out}"
        )
    layout = _differences(flags_with("buffers"), stored, args)
    if layout:
        raise CheckpointError(
            f"{intro}, and they have changed:{_lines(layout)}\n"
            "Resume in the old layout, save with --dist-ckpt-optim-fully-reshardable, and change "
            f"the layout then, {way_out}"
        )


def _is_stock(stored: Namespace) -> bool:
    """Whether a checkpoint holds no setting of this program."""
    return not any(hasattr(stored, name) for name in switch_traits())


def _differences(names: Iterable[str], stored: Namespace, args: Namespace) -> list[Difference]:
    """Compare attributes; one that either side lacks is not compared."""
    return [
        Difference(shown_flag(name), getattr(stored, name), getattr(args, name))
        for name in names
        if _of(stored, name, _ABSENT) is not _ABSENT
        and _of(args, name, _ABSENT) is not _ABSENT
        and _plain(getattr(stored, name)) != _plain(getattr(args, name))
    ]


def _plain(value: Any) -> Any:
    """Return a setting in a form in which equal ones compare equal."""
    if value is None:
        return 0  # an unset coefficient, capacity or size
    if isinstance(value, (list, tuple)):
        value = list(value)
        return value[0] if len(value) == 1 else value
    return value


def _of(namespace: Namespace, name: str, default: Any = None) -> Any:
    return getattr(namespace, name, default)


def _activation(namespace: Namespace) -> str | None:
    """Return the nonlinearity of a t5, where ``auto`` is ReLU; that of a gpt has other flags."""
    if _of(namespace, "switch_arch", "gpt") != "t5":
        return None
    chosen = _of(namespace, "switch_activation")
    return "relu" if chosen == "auto" else chosen


def _query_groups(*namespaces: Namespace) -> list[int | None]:
    """Return the key-value heads of each, where any has fewer of them than heads."""
    grouped = [bool(_of(each, "group_query_attention")) for each in namespaces]
    names = ["num_query_groups" if each else "num_attention_heads" for each in grouped]
    if not any(grouped):
        return [None] * len(namespaces)
    return [_of(each, name) for each, name in zip(namespaces, names, strict=True)]


def _sparse_layers(namespace: Namespace) -> list[int] | None:
    """Return the layers with experts, counted from 0, however ``--moe-layer-freq`` said it."""
    if not _of(namespace, "num_experts"):
        return None
    layer_freq = _of(namespace, "moe_layer_freq", 1)
    # A list that was given for another depth shows as such, beside the depths.
    depth = len(layer_freq) if isinstance(layer_freq, list) else namespace.num_layers
    return list(sparse_layers(layer_freq, depth))


def _precision(namespace: Namespace) -> str:
    for name in ("bf16", "fp16"):
        if _of(namespace, name):
            return f"--{name}"
    return "fp32"


def _lines(differences: Iterable[Difference]) -> str:
    return "".join(f"\n  {difference}" for difference in differences)
