"""A trained model, opened from its checkpoint for forward passes only.

Nothing but the folder is needed: architecture, Switch settings and tokenizer come from the
arguments stored in the checkpoint (:mod:`megatron_switch.training.arguments.stored_arguments`). The
layout does not: a checkpoint written by any number of ranks opens on one, and on several under a
launcher with layout flags. There is no optimizer, no gradient buffer and no data-parallel wrapper,
so the memory is that of the weights, and no weight is drawn before it is read.

Guaranteed: every weight of the model was read, and every weight of the checkpoint was used. The
files have been checked to be complete, and to contain nothing that runs code, before any is read.

Refused: pipeline and context parallelism. Both change where a forward pass happens and nothing of
its result, and another layout of the same checkpoint is always at hand.

Shape letters: B sequences, S positions, V rows of the vocabulary.
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_switch import parallel_state
from megatron_switch.architecture.vocabulary import padded_vocab_size
from megatron_switch.checkpoint.formats.dist_metadata import (
    NOT_WEIGHTS,
    read_common_state,
    read_index,
)
from megatron_switch.checkpoint.load.files import (
    FoundCheckpoint,
    checkpoint_folder,
    find_checkpoint,
)
from megatron_switch.checkpoint.load.norm_keys import name_norms_as_stored
from megatron_switch.checkpoint.load.settings_agreement import check_model
from megatron_switch.config import SwitchConfig
from megatron_switch.data.tokenizer import Tokenizer, build_tokenizer, check_tokenizer_flags
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.errors import CheckpointError, ConfigError, DataError
from megatron_switch.flags.known_flags import check_megatron_flags, flags_without_effect
from megatron_switch.flags.traits import Condition
from megatron_switch.layout.grid import Layout
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.arguments.parser import CommandLine, parse_command_line
from megatron_switch.training.arguments.stored_arguments import (
    compared_attributes,
    with_stored_model,
)
from megatron_switch.training.loop.global_state import process_groups, validate
from megatron_switch.training.loop.gpt_builder import model_config, resolve_dispatch
from megatron_switch.training.preflight.device import choose_device, look_around
from megatron_switch.training.preflight.layout import check_layout
from megatron_switch.upstream.version import check_version


@dataclass(frozen=True)
class TrainedModel:
    """A model with its trained weights, in evaluation mode, on the device of this rank."""

    module: torch.nn.Module
    """Megatron's ``GPTModel``, or our ``SwitchT5Model``; in 16-bit precision inside its wrapper.
    Its logits are gathered."""
    tokenizer: Tokenizer
    args: Namespace
    """Megatron's validated arguments, with the model's settings from the checkpoint."""
    switch: SwitchConfig
    """Switch settings in force."""
    checkpoint: FoundCheckpoint
    device: Literal["cuda", "cpu"]
    notes: tuple[str, ...]
    """What the user should know."""

    @property
    def answers(self) -> bool:
        """Whether the model is an encoder-decoder: it answers a text, and does not continue it."""
        return bool(self.args.switch_arch == "t5")

    @property
    def context_length(self) -> int:
        """Positions that a sequence has, as in training; of an encoder-decoder, its input."""
        return int(self.args.seq_length)

    @property
    def width_multiple(self) -> int:
        """What the number of positions of an input must divide by."""
        return int(self.args.tensor_model_parallel_size if self.args.sequence_parallel else 1)

    def logits(self, tokens_BS: Tensor, padding_BS: Tensor) -> Tensor:
        """Return the scores of every position. All ranks that share the model call this together.

        Only for a model of one stack.

        Args:
            tokens_BS: Tokens, int64, on any device; S is a multiple of ``width_multiple``.
            padding_BS: True where no token stands; such a position takes no expert's slot.

        Returns:
            Shape (B, S, V), on the model's device.
        """
        position_BS = torch.arange(tokens_BS.size(1), device="cuda").expand_as(tokens_BS)
        with torch.no_grad():
            logits_BSV: Tensor = self.module(
                tokens_BS.cuda(), position_BS, None, padding_mask=padding_BS.cuda()
            )
        return logits_BSV


@contextmanager
def open_trained_model(
    folder: Path, flags: Sequence[str], *, drop: bool = False
) -> Iterator[TrainedModel]:
    """Open the model in a checkpoint folder for the length of a ``with`` block.

    Args:
        folder: What ``--load`` names, or a ``--switch-run-dir`` that holds it.
        flags: Megatron's and our flags: layout, device, and what shall differ from the checkpoint.
        drop: Whether experts have the capacity of evaluation; without it no token is dropped.

    Yields:
        The model. Process groups exist inside the block and are gone after it.

    Raises:
        SwitchError: The checkpoint, its tokenizer or the flags cannot be used.
    """
    check_version()
    line = parse_command_line(flags)
    found = find_checkpoint(checkpoint_folder(folder), iteration=line.args.ckpt_step)
    state = read_common_state(found.folder)
    stored = state.get("args")
    if stored is not None:
        line = with_stored_model(line, stored, where=found.folder.parent)
    elif "num_layers" not in line.explicit:
        raise CheckpointError(
            f"The checkpoint {found.folder} stores no arguments, so its model is not known. Give "
            "the flags it was trained with (--num-layers, --hidden-size, --tokenizer-type, ...), "
            "or name a file of them with --switch-model."
        )
    device = choose_device(line.args.switch_device, look_around(os.environ))
    opening = _Opening(line, found, state, device, drop=drop)
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(cuda_on_cpu())
        stack.enter_context(process_groups(line.args, opening.check()))
        stack.callback(parallel_state.destroy_model_parallel)
        yield opening.model()


class _Opening:
    """The way from a command line and a checkpoint to a model."""

    def __init__(
        self,
        line: CommandLine,
        found: FoundCheckpoint,
        state: Mapping[str, Any],
        device: Literal["cuda", "cpu"],
        *,
        drop: bool,
    ) -> None:
        self._args = line.args
        self._explicit = line.explicit
        self._found = found
        self._state = state
        self._device = device
        self._notes = [found.message] if found.message else []
        fill_defaults(line, device)
        self._set_for_inference()
        self._switch = self._settings(drop=drop)

    def check(self) -> Layout:
        """Let Megatron complete the arguments, and check all that needs no process group."""
        args, stored = self._args, self._state.get("args")
        if args.num_experts:
            check_megatron_flags(args)
        self._refuse_layouts()
        layout = check_layout(args, self._switch)
        validate(args)
        self._tokenizer = self._build_tokenizer()
        args.padded_vocab_size = padded_vocab_size(
            self._tokenizer.vocab_size,
            make_divisible_by=args.make_vocab_size_divisible_by,
            tensor_parallel_size=args.tensor_model_parallel_size,
            stored=getattr(stored, "padded_vocab_size", None),
        )
        if stored is not None:
            check_model(stored, args, compared_attributes())
        return layout

    def model(self) -> TrainedModel:
        """Build and load, after :meth:`check` and inside of process groups."""
        return TrainedModel(
            built_and_loaded(self._args, self._switch, self._found.folder, self._state),
            self._tokenizer,
            self._args,
            self._switch,
            self._found,
            self._device,
            tuple(self._notes),
        )

    def _set_for_inference(self) -> None:
        args = self._args
        args.micro_batch_size = 1
        args.global_batch_size = None  # Megatron makes it one for each data-parallel rank
        args.perform_initialization = False  # every weight is read
        args.exit_signal_handler = False  # there is nothing to save: SIGTERM ends the program

    def _settings(self, *, drop: bool) -> SwitchConfig:
        args, switch = self._args, SwitchConfig.from_args(self._args)
        if not drop:
            failed: dict[Condition, str] = {"limit": "without --drop no token is dropped."}
            idle = flags_without_effect(self._explicit, failed)
            self._notes += [f"{flag} has no effect: {why}" for flag, why in idle.items()]
            switch = replace(
                switch,
                capacity=None,
                eval_capacity_factor=-1.0,
                # Without a limit these two decide nothing, and some layouts do not allow them.
                capacity_group="microbatch",
                drop_order="first_come",
            )
        return resolve_dispatch(args, switch, self._device)

    def _refuse_layouts(self) -> None:
        for name, flag in (
            ("pipeline_model_parallel_size", "--pipeline-model-parallel-size"),
            ("context_parallel_size", "--context-parallel-size"),
        ):
            size = getattr(self._args, name)
            if size != 1:
                raise ConfigError(
                    f"A model that is only read is not cut by {flag}, got {size}. A checkpoint "
                    "opens in any layout, whatever it was trained in: leave the flag out, and "
                    "share a large model with --tensor-model-parallel-size and "
                    "--expert-model-parallel-size."
                )

    def _build_tokenizer(self) -> Tokenizer:
        try:
            check_tokenizer_flags(self._args)
        except DataError as error:
            if "tokenizer_model" in self._explicit:
                raise
            raise DataError(
                "The tokenizer that the checkpoint names is not where it was in training: "
                f"{self._args.tokenizer_model} (seen from {Path.cwd()}). Give its place with "
                f"--tokenizer-model. ({error})"
            ) from error
        return build_tokenizer(self._args)


def built_and_loaded(
    args: Namespace, switch: SwitchConfig, folder: Path, state: Mapping[str, Any]
) -> torch.nn.Module:
    """Return the model of some arguments with a checkpoint's weights, in evaluation mode.

    Call it inside of process groups. No weight is drawn before it is read.

    Args:
        args: Validated arguments.
        switch: Settings, with the dispatch that is in force.
        folder: Folder of the checkpoint's iteration.
        state: Its common state.

    Raises:
        CheckpointError: A weight is missing, left over, or cannot be read.
    """
    config = model_config(args, switch)
    config.parallel_output = False
    config.finalize()
    model_parallel_cuda_manual_seed(args.seed)  # names the random streams; none is used
    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    (module,) = builder.build_distributed_models(groups, wrap_with_ddp=False)
    _load_weights(unwrap_model(module), folder, state)
    model: torch.nn.Module = module.eval()
    return model


def _load_weights(module: Any, folder: Path, state: Mapping[str, Any]) -> None:
    """Read every weight of ``module`` from a checkpoint, each rank its part.

    Raises:
        CheckpointError: A weight is missing, left over, or cannot be read.
    """
    metadata = dict(state.get("content_metadata") or {})
    metadata["dp_cp_group"] = mpu.get_data_parallel_group(with_context_parallel=True)
    wanted = {"model": module.sharded_state_dict(metadata=metadata)}
    name_norms_as_stored(wanted, read_index(folder).state_dict_metadata)
    try:
        loaded, unused, absent = dist_checkpointing.load(wanted, str(folder), strict="return_all")
    except (CheckpointingException, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"The checkpoint {folder} cannot be loaded: {error}. Load another iteration with "
            "--ckpt-step."
        ) from error
    unused = {name for name in unused if not name.startswith(NOT_WEIGHTS)}
    weights = {name: value for name, value in loaded["model"].items() if _is_weight(name)}
    problem = module.load_state_dict(weights, strict=False)
    missing = {*filter(_is_weight, absent), *filter(_is_weight, problem.missing_keys)}
    unused = {*filter(_is_weight, unused), *problem.unexpected_keys}
    if missing or unused:
        raise CheckpointError(
            f"The checkpoint {folder} is of another model.{_names('It lacks', missing)}"
            f"{_names('Not part of the model are', unused)} Give the flags it was trained with, or "
            "load another checkpoint with --load."
        )


def _is_weight(name: str) -> bool:
    """Whether a name is of a weight, and not of what only Transformer Engine's modules keep."""
    return "_extra_state" not in name


def _names(text: str, names: set[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return f" {text} {', '.join(shown[:5])}{more}." if shown else ""
