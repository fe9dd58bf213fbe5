"""The calls that set Megatron's global state, in Megatron's own order.

Megatron's entry point makes all of them in one function, without a place for checks between
parsing, validation and the first process group. Its bare assertions become errors here.
"""

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.training import get_timers, get_tokenizer
from megatron.training.arguments import validate_args
from megatron.training.global_vars import rebuild_tokenizer, set_global_variables

from megatron_switch import parallel_state
from megatron_switch.architecture.vocabulary import padded_vocab_size
from megatron_switch.errors import ConfigError, DataError
from megatron_switch.layout.grid import Layout
from megatron_switch.training.arguments.refusals import explain_refusal
from megatron_switch.upstream.private import HashStore, fake_store


def validate(args: Namespace) -> None:
    """Let Megatron check and complete the arguments, in place.

    Raises:
        ConfigError: Megatron asserts or raises; the message has its rule, values and flags.
    """
    several = (
        args.use_megatron_fsdp or args.use_torch_fsdp2 or args.overlap_moe_expert_parallel_comm
    )
    cut = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    if cut and not several:
        # Before Blackwell, Megatron asserts this: one queue keeps communication in order. It
        # refuses it where more than one is used.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        validate_args(args)
    except (AssertionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"Megatron refuses these flags: {explain_refusal(error)}") from error
    # A missing checkpoint would otherwise start from random weights, with exit code 0 at the end.
    args.exit_on_missing_checkpoint = True


def begin_megatron(args: Namespace) -> None:
    """Set Megatron's global variables, tokenizer included, and pad the vocabulary.

    Raises:
        DataError: The tokenizer cannot be built.
        LayoutError: The tensor-parallel size does not divide the padded vocabulary.
    """
    # Until process groups exist there is nothing to save, so a signal ends the process. Log writers
    # are opened last, by open_log_writers: the run may still be refused.
    later = {
        "exit_signal_handler": False,
        "tensorboard_dir": None,
        "wandb_project": "",
        "enable_one_logger": False,
    }
    wanted = {name: getattr(args, name) for name in later}
    vars(args).update(later)
    set_global_variables(args, build_tokenizer=False)
    vars(args).update(wanted)
    try:
        rebuild_tokenizer(args)
    except Exception as error:  # whatever the tokenizer's own library raises
        raise DataError(
            f"The tokenizer cannot be built from --tokenizer-type {args.tokenizer_type} and "
            f"--tokenizer-model {args.tokenizer_model}: {type(error).__name__}: {error}"
        ) from error
    args.padded_vocab_size = padded_vocab_size(
        get_tokenizer().vocab_size,
        make_divisible_by=args.make_vocab_size_divisible_by,
        tensor_parallel_size=args.tensor_model_parallel_size,
    )


@contextmanager
def process_groups(args: Namespace, layout: Layout) -> Iterator[None]:
    """Create ``torch.distributed`` and all groups of ``layout`` for the length of a block.

    ``pretrain`` finds and uses them. They are destroyed when the block ends or exits, but not
    when it fails: that could wait for ranks that have ended, and delay the traceback.
    """
    _build_process_groups(args, layout)
    try:
        yield
    except SystemExit:  # Megatron exits so at --exit-interval and on SIGTERM
        torch.distributed.destroy_process_group()
        raise
    torch.distributed.destroy_process_group()


def _build_process_groups(args: Namespace, layout: Layout) -> None:
    if not torch.distributed.is_initialized():
        torch.cuda.set_device(args.local_rank)
        torch.distributed.init_process_group(
            backend="fake" if args.fake_process_group else args.distributed_backend,
            world_size=args.world_size,
            rank=args.rank,
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
            store=_store(args),
        )
    if not mpu.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel_as_pretrain(layout, vars(args))


def _store(args: Namespace) -> Any:
    """Return the store for the rendezvous; None for the launcher's."""
    if args.fake_process_group:
        return fake_store()
    # A single rank needs no rendezvous, and hence no launcher.
    return HashStore() if args.world_size == 1 else None


def training_seconds() -> float:
    """Return the seconds spent in training iterations, without evaluation and saving."""
    timer = get_timers()("interval-time")
    timer.elapsed(reset=False)  # brings the sum up to now
    seconds: float = timer.active_time()
    return seconds
