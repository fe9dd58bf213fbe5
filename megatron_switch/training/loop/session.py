"""One training run, start to end: check, print the banner, and call Megatron's ``pretrain``.

The order is the design: every user error is found before a process group exists, and everything
that changes Megatron's behaviour is passed to it as an argument or declared as a patch; patches are
applied here and undone at the end. What a rehearsal does otherwise is in its hooks
(:mod:`megatron_switch.training.loop.hooks`).
"""

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megatron_switch.checkpoint.load.files import checkpoint_folder
from megatron_switch.config import SwitchConfig
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.layout.grid import Layout
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.arguments.parser import CommandLine, parse_command_line
from megatron_switch.training.arguments.stored_arguments import with_checkpoint_args
from megatron_switch.training.logs.banner import banner
from megatron_switch.training.logs.console import Console
from megatron_switch.training.logs.run_folder import RunFolder
from megatron_switch.training.loop.datasets import datasets_provider_of
from megatron_switch.training.loop.exit_signals import ExitSignals, code_after, exit_signals
from megatron_switch.training.loop.global_state import begin_megatron, process_groups, validate
from megatron_switch.training.loop.gpt_builder import model_config, resolve_dispatch
from megatron_switch.training.loop.hooks import Device, RunHooks
from megatron_switch.training.loop.monitors import loop_monitors
from megatron_switch.training.loop.outputs import RunOutputs, host_names
from megatron_switch.training.preflight.data import check_data
from megatron_switch.training.preflight.device import choose_device, look_around
from megatron_switch.training.preflight.flags import check_before_megatron, check_schedule
from megatron_switch.training.preflight.launcher import (
    check_meeting_port,
    check_rank_environment,
    slurm_ranks,
)
from megatron_switch.training.preflight.layout import check_layout
from megatron_switch.training.preflight.resume import find_what_to_load, keep_own_progress
from megatron_switch.training.preflight.write_targets import explain_full_disk
from megatron_switch.upstream.private import install_signal_handler
from megatron_switch.upstream.repairs import repaired_megatron


def train(argv: Sequence[str]) -> None:
    """Train as the command line says; returns when training ends, or exits as Megatron does.

    Args:
        argv: Megatron's and our flags, without the program's name.

    Raises:
        SwitchError: A user error; the message says what to change.
    """
    os.environ.update(slurm_ranks(os.environ))
    check_rank_environment(os.environ)
    line = parse_command_line(argv)
    device = choose_device(line.args.switch_device, look_around(os.environ))
    with cuda_on_cpu() if device == "cpu" else nullcontext():
        _run(line, device, list(argv), RunHooks())


def rehearse(argv: Sequence[str], hooks: RunHooks) -> None:
    """Run the session as the rank that ``RANK`` and ``WORLD_SIZE`` name, on the CPU.

    Args:
        argv: The flags of the launch that is rehearsed.
        hooks: What differs from a launch.

    Raises:
        SwitchError: What the launch would raise, or what cannot be rehearsed.
        SystemExit: With code 0, when the hooks end the run.
    """
    line = parse_command_line(argv)
    with cuda_on_cpu():
        _run(line, "cpu", list(argv), hooks)


def _run(line: CommandLine, device: Device, argv: list[str], hooks: RunHooks) -> None:
    with repaired_megatron(), hooks.session():
        session = _Session(line, device, argv, hooks)
        try:
            session.run()
        except SystemExit as ended:
            if not (ended.code or session.exit_code):
                raise
            raise SystemExit(ended.code or session.exit_code) from None


class _Session:
    """The run that a command line describes."""

    def __init__(self, line: CommandLine, device: Device, argv: list[str], hooks: RunHooks) -> None:
        args = line.args
        if args.load is not None:
            args.load = str(checkpoint_folder(Path(args.load)))
        self._args: Namespace = args
        self._line = line
        self._device = device
        self._argv = argv
        self._hooks = hooks
        self._notes: tuple[str, ...] = ()
        self._signals: ExitSignals | None = None
        if args.switch_run_dir is not None:
            folder = RunFolder(Path(args.switch_run_dir))
            folder.check_ownership()
            self._notes = folder.apply(args, line.explicit)
        self._notes += keep_own_progress(args, os.environ)
        hooks.arguments_parsed(args)
        # A rehearsal takes its flags from a run folder too, and then has none.
        self._folder = RunFolder(Path(args.switch_run_dir)) if args.switch_run_dir else None
        self._outputs = RunOutputs(args, self._folder)
        self._set_here = fill_defaults(with_checkpoint_args(line), device)
        self._switch = resolve_dispatch(
            args, SwitchConfig.from_args(args), hooks.dispatch_device(device)
        )
        hooks.settings_resolved(args, self._switch)

    @property
    def exit_code(self) -> int:
        """The exit code that a signal, if there was one, gives the program."""
        number = self._ended_by
        if number is None:
            return 0
        return code_after(number, saves=self._args.save is not None, environ=os.environ)

    @property
    def _ended_by(self) -> Signals | None:
        return None if self._signals is None else self._signals.ended_by

    def run(self) -> None:
        """Check everything, then train."""
        args, hooks = self._args, self._hooks
        check_meeting_port(os.environ)
        self._notes += check_before_megatron(self._line, self._switch, self._device)
        layout = check_layout(args, self._switch)
        self._outputs.check()
        log_folder = None if self._folder is None else self._folder.log
        console = Console(
            log_folder, rank=args.rank, world_size=args.world_size, trains=not args.skip_train
        )
        with console:
            validate(args)
            check_schedule(args)
            hooks.arguments_validated(args)
            if self._folder is not None and args.rank == 0:
                self._folder.check_identity(args)
            if self._is_finished(console):
                return
            begin_megatron(args)
            self._notes += check_data(args)
            self._notes += find_what_to_load(args)
            model = model_config(args, self._switch)
            hooks.check_memory(args, layout, self._device)
            self._outputs.create()
            self._print_banner(layout, console)
            with process_groups(args, layout):
                # Every rank has passed its checks, or the groups would not exist.
                console.commit_log()
                hosts = host_names(args)
                self._signals = exit_signals(args, console.say)
                if self._signals is not None:
                    install_signal_handler(self._signals.__enter__())
                with hooks.training(args, self._notes), self._end_recorded():
                    self._train(model, layout, hosts, console)

    @contextmanager
    def _end_recorded(self) -> Iterator[None]:
        """Record how the block ends; where a signal ends it, all ranks leave it together."""
        try:
            yield
        except BaseException as error:
            self._outputs.record_end(error, self._ended_by, self.exit_code)
            if (
                isinstance(error, SystemExit) and self.exit_code
            ):  # a launcher ends the others at the first code that is not 0
                torch.distributed.barrier()
            raise
        self._outputs.record_end(None, None, 0)

    def _is_finished(self, console: Console) -> bool:
        """Return whether nothing is left to do, and say so."""
        finished = self._hooks.find_finished(self._args)
        if finished is None:
            return False
        if finished.ends_here:
            console.say(finished.text)
        else:
            self._notes += (finished.text,)
        return finished.ends_here

    def _print_banner(self, layout: Layout, console: Console) -> None:
        text = banner(
            self._args,
            self._switch,
            layout,
            device=self._device,
            ranks_per_node=_ranks_per_node(),
            set_here=self._set_here,
            log_text=console.log_text,
        )
        for each in (text, *self._notes):
            console.say(each)

    def _train(self, model: Any, layout: Layout, hosts: Sequence[str], console: Console) -> None:
        args = self._args
        provider = self._hooks.datasets_provider(args, datasets_provider_of(args))

        @wraps(provider)  # which says by an attribute that it is called on every rank
        def after_loading(*values: Any, **named: Any) -> Any:
            self._outputs.record_start(
                self._argv, self._device, layout, hosts, ranks_per_node=_ranks_per_node()
            )
            return provider(*values, **named)

        with (
            self._outputs.old_checkpoints_deleted(),
            loop_monitors(args, self._switch, model, console.say_beside_losses) as monitors,
        ):
            try:
                pretrain(
                    pretrain_cfg_container_from_args(args, model),
                    after_loading,
                    ModelType.encoder_or_decoder,
                    monitors.forward_step,
                    process_non_loss_data_func=monitors.evaluation.write,
                    non_loss_data_func=monitors.evaluation.collect,
                )
            except OSError as error:
                explain_full_disk(error, args)
                raise


def _ranks_per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
