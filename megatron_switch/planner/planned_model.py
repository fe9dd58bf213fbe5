"""From a named model and pretrain flags to what the planner needs to know of a model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.model_flags import capacity_of, model_from_flags, read_model
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import argv_of, attribute_of, flag_key, flags_of_argv
from megatron_switch.flags.known_flags import KNOWN_FLAGS
from megatron_switch.flags.recipes import RECIPES
from megatron_switch.flags.train_flags import refuse_unknown
from megatron_switch.flags.traits import check_ranges
from megatron_switch.flags.values import FlagValues
from megatron_switch.layout.sizes import given_sizes
from megatron_switch.layout.workload import Dispatch, Training
from megatron_switch.planner.plan_flags import PLANNED_FLAGS

_MODES: dict[str, tuple[Dispatch, ...]] = {
    "auto": ("padded", "packed"),
    "padded": ("padded",),
    "packed": ("packed",),
}


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
        name: For people.
        model: Its description.
        training: Sequence, capacity, precision and dropout.
        argv: The flags of ``megatron-switch train`` that describe it, without the planned ones.
        fixed: Parallel sizes and micro-batch that were given.
        dispatches: Dispatch modes to consider.
        global_batch_size: As given, or None.
        flags: All flags of the model and of the command line, by name without dashes.
        given: Those of the command line.
    """

    name: str
    model: Architecture
    training: Training
    argv: tuple[str, ...]
    fixed: dict[str, int]
    dispatches: tuple[Dispatch, ...]
    global_batch_size: int | None
    flags: Mapping[str, object]
    given: Mapping[str, object]

    @property
    def train_tokens(self) -> int | None:
        """Tokens of the whole training, as its flags say, or None."""
        values = FlagValues(self.flags)
        samples = values.integer("train-samples", None)
        iterations = values.integer("train-iters", None)
        if samples is None and iterations is not None and self.global_batch_size is not None:
            samples = iterations * self.global_batch_size
        return None if samples is None else samples * self.training.seq_length

    def not_kept(self, plan_argv: Sequence[str]) -> list[str]:
        """Return the given flags for which a plan has another value, or none.

        Args:
            plan_argv: The flags of the plan.
        """
        planned = flags_of_argv(plan_argv)
        names = [name for name in self.given if name in PLANNED_FLAGS]
        return [
            " ".join(argv_of({name: self.given[name]}))
            for name in names
            if planned.get(name) != self.given[name]
        ]


def planned_model(name: str | None, pretrain: Sequence[str]) -> PlannedModel:
    """Return the model of ``--model`` and of pretrain flags, of which the latter win.

    Args:
        name: Named model or JSON file; None where the flags say it all.
        pretrain: Flags of a ``megatron-switch train`` command line.

    Raises:
        ConfigError: If there is no model, or a flag that matters cannot be used.
    """
    refuse_unknown(pretrain)
    given = flags_of_argv(pretrain)
    name = str(given["switch-model"]) if name is None and "switch-model" in given else name
    if name is None and not given:
        raise ConfigError(
            "There is no model to plan: name one with --model, or give its pretrain flags after --."
        )
    flags = {**(read_model(name) if name is not None else {}), **given}
    flags = {**_of_recipe(flags), **flags}
    values = FlagValues(flags)
    check_ranges(KNOWN_FLAGS, dict(_numbers(flags)))
    mode = values.text("switch-dispatch", "auto")
    if mode not in _MODES:
        raise ConfigError(f"--switch-dispatch is auto, packed or padded, got {mode}.")
    argv = ["--switch-model", name] if name is not None else []
    kept = given.keys() - {*PLANNED_FLAGS, "switch-model"}
    argv += argv_of({flag: value for flag, value in given.items() if flag in kept})
    return PlannedModel(
        name=name or "pretrain flags",
        model=model_from_flags(flags),
        training=_training(values),
        argv=tuple(argv),
        fixed=_fixed(values),
        dispatches=_MODES[mode],
        global_batch_size=values.integer("global-batch-size", None),
        flags=flags,
        given=given,
    )


def _of_recipe(flags: Mapping[str, object]) -> dict[str, object]:
    """Return the flags that a recipe sets, where one is named."""
    name = flags.get("switch-recipe")
    if name is None:
        return {}
    if name not in RECIPES:
        raise ConfigError(f"--switch-recipe is one of {', '.join(RECIPES)}, got {name}.")
    return {flag_key(each): value for each, value in RECIPES[str(name)].items()}


def _numbers(flags: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the flags whose value is a number, by attribute of Megatron's namespace."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            with suppress(TypeError, ValueError):
                yield attribute_of(name), float(value)  # type: ignore[arg-type]


def _training(values: FlagValues) -> Training:
    rope = values.text("position-embedding-type", "learned_absolute") == "rope"
    return Training(
        seq_length=values.integer("seq-length"),
        precision="fp16" if values.on("fp16") else "bf16",
        capacity=capacity_of(values.values),
        transformer_engine=values.text("transformer-impl", "") == "transformer_engine",
        hidden_dropout=values.number("hidden-dropout", 0.1),
        rotary=rope or values.on("use-rotary-position-embeddings"),
        fused_gate=values.on("swiglu") and not values.on("no-bias-swiglu-fusion"),
    )


def _fixed(values: FlagValues) -> dict[str, int]:
    micro_batch = values.integer("micro-batch-size", None)
    given = {} if micro_batch is None else {"micro_batch_size": micro_batch}
    return {**given_sizes(values), **given}
