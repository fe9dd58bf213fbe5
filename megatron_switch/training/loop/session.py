"""One training run, start to end: check, print the banner, and call Megatron's ``pretrain``.

The order is the design: every user error is found before a process group exists, and everything
that changes Megatron's behaviour is passed to it as an argument or declared as a patch; patches are
applied here and undone at the end. What a rehearsal does otherwise is in its hooks
(:mod:`megatron_switch.training.loop.hooks`).
"""

import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megatron_switch.checkpoint.load.files import checkpoint_folder
from megatron_switch.config import SwitchConfig
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.rank_table import table_as_csv
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
from megatron_switch.training.preflight.data import check_data
from megatron_switch.training.preflight.device import choose_device, look_around
from megatron_switch.training.preflight.flags import check_before_megatron, check_schedule
from megatron_switch.training.preflight.launcher import (
    check_meeting_port,
    check_rank_environment,
    slurm_ranks,
)
from megatron_switch.training.preflight.layout import check_layout
from megatron_switch.training.preflight.resume import (
    clear_the_way,
    find_what_to_load,
    keep_own_progress,
)
from megatron_switch.training.preflight.write_targets import (
    check_write_targets,
    explain_full_disk,
    make_write_targets,
)
from megatron_switch.upstream.private import install_signal_handler
from megatron_switch.upstream.repairs import repaired_megatron
from megatron_switch.utils.folder_lock import FolderLock


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
        self._locks = _locks(args)
        self._set_here = fill_defaults(with_checkpoint_args(line), device)
        self._switch = resolve_dispatch(
            args, SwitchConfig.from_args(args), hooks.dispatch_device(device)
        )
        hooks.settings_resolved(args, self._switch)

    @property
    def exit_code(self) -> int:
        """The exit code that a signal, if there was one, gives the program."""
        number = None if self._signals is None else self._signals.ended_by
        if number is None:
            return 0
        return code_after(number, saves=self._args.save is not None, environ=os.environ)

    def run(self) -> None:
        """Check everything, then train."""
        args, hooks = self._args, self._hooks
        check_meeting_port(os.environ)
        self._notes += check_before_megatron(self._line, self._switch, self._device)
        layout = check_layout(args, self._switch)
        self._check_outputs()
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
            self._create_outputs()
            self._print_banner(layout, console)
            with process_groups(args, layout), hooks.training(args, self._notes):
                # Every rank has passed its checks, or the groups would not exist.
                console.commit_log()
                self._signals = exit_signals(args, console.say)
                if self._signals is not None:
                    install_signal_handler(self._signals.__enter__())
                self._train(model, layout, console)

    def _check_outputs(self) -> None:
        """Check, on the first rank, that the run can write what it will write."""
        if self._args.rank != 0:
            return
        check_write_targets(self._args)
        self._lock_outputs()

    def _create_outputs(self) -> None:
        """Create, on the first rank, what the run writes to; nothing can refuse the run now."""
        args = self._args
        if args.rank != 0:
            return
        make_write_targets(args)
        self._lock_outputs()

    def _lock_outputs(self) -> None:
        for lock in self._locks:
            lock.acquire()

    def _record_start(self, layout: Layout) -> None:
        """Record this start in the folder of the run: its checkpoint is loaded, it can train.

        Before, a start that fails would leave a ``resume.sh`` that fails as well.
        """
        args = self._args
        if args.rank != 0 or args.fake_process_group:
            return
        clear_the_way(args)
        if self._folder is None:
            return
        self._folder.describe(args, self._argv, self._device)
        table = table_as_csv(layout, num_experts=args.num_experts, ranks_per_node=_ranks_per_node())
        self._folder.rank_table.write_text(table, encoding="utf-8")

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

    def _train(self, model: Any, layout: Layout, console: Console) -> None:
        args = self._args
        provider = self._hooks.datasets_provider(args, datasets_provider_of(args))

        @wraps(provider)  # which says by an attribute that it is called on every rank
        def after_loading(*values: Any, **named: Any) -> Any:
            self._record_start(layout)
            return provider(*values, **named)

        with loop_monitors(args, self._switch, model, console.say_beside_losses) as monitors:
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


def _locks(args: Namespace) -> list[FolderLock]:
    """Return the locks of the folders in which no other run may save."""
    folders = {args.switch_run_dir: "--switch-run-dir", args.save: "--save"}
    if args.skip_train:
        folders.pop(args.save)
    return [FolderLock(Path(folder), flag) for folder, flag in folders.items() if folder]


def _ranks_per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
