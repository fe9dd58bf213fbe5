"""One training run, start to end: check, announce, and let Megatron's ``pretrain`` work.

The order is the design: everything that a user can have got wrong is checked before a process group
exists, and everything that changes Megatron's behaviour goes through a seam or stands in the two
files of patches, which are entered here and left at the end.
"""

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron.core.enums import ModelType
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megatron_switch.architecture.model import Architecture
from megatron_switch.checkpoint.load.files import checkpoint_folder
from megatron_switch.config import SwitchConfig
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.rank_table import table_as_csv
from megatron_switch.moe.metrics.routing_counts import RoutingReport
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.arguments.parser import CommandLine, parse_command_line
from megatron_switch.training.arguments.stored_arguments import with_checkpoint_args
from megatron_switch.training.logs.banner import banner
from megatron_switch.training.logs.console import Console
from megatron_switch.training.logs.drop_watch import CapacityFacts, DropWatch
from megatron_switch.training.logs.metrics_file import MetricsFile, StepWriter
from megatron_switch.training.logs.run_folder import RunFolder
from megatron_switch.training.loop.batch import ForwardStep, datasets_provider
from megatron_switch.training.loop.evaluation import EvaluationProgress, EvaluationReporter
from megatron_switch.training.loop.global_state import (
    begin_megatron,
    process_groups,
    training_seconds,
    validate,
)
from megatron_switch.training.loop.gpt_builder import model_config, resolve_dispatch
from megatron_switch.training.loop.nonfinite import NonFiniteGuard
from megatron_switch.training.loop.t5_batch import T5ForwardStep, t5_datasets_provider
from megatron_switch.training.preflight.data import check_data
from megatron_switch.training.preflight.device import choose_device, look_around
from megatron_switch.training.preflight.flags import check_before_megatron, check_schedule
from megatron_switch.training.preflight.launcher import (
    check_meeting_port,
    check_rank_environment,
    slurm_ranks,
)
from megatron_switch.training.preflight.layout import check_layout, check_model_memory
from megatron_switch.training.preflight.resume import find_finished, find_what_to_load
from megatron_switch.training.preflight.write_targets import (
    check_write_targets,
    explain_full_disk,
    make_write_targets,
)
from megatron_switch.upstream.private import open_log_writers, replace_tensorboard_writer
from megatron_switch.upstream.repairs import repaired_megatron

if TYPE_CHECKING:
    from megatron_switch.rehearsal.dry_run import Observed

_SETTLING = 100
"""Least iterations before a drop rate says anything about the router."""


def train(argv: Sequence[str]) -> None:
    """Train as the command line says; returns when training ends, or exits as Megatron does.

    Args:
        argv: Megatron's and our flags, without the program's name.

    Raises:
        SwitchError: Something cannot work; the message says what to change.
    """
    os.environ.update(slurm_ranks(os.environ))
    check_rank_environment(os.environ)
    line = parse_command_line(argv)
    device = choose_device(line.args.switch_device, look_around(os.environ))
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(cuda_on_cpu())
        stack.enter_context(repaired_megatron())
        _Run(line, device, list(argv)).start()


def rehearse(argv: Sequence[str], rehearsal: "Observed") -> None:
    """Take two steps as the rank that ``RANK`` and ``WORLD_SIZE`` say, on the CPU, watched.

    Args:
        argv: The flags of the launch that is rehearsed.
        rehearsal: What is done otherwise (alone and without values, or nothing); it receives what
            was seen.

    Raises:
        SwitchError: What the launch would raise, or what cannot be rehearsed.
        SystemExit: With code 0, when the rehearsal is over.
    """
    line = parse_command_line(argv)
    with cuda_on_cpu(), repaired_megatron(), rehearsal.surroundings():
        _Run(line, "cpu", list(argv), rehearsal).start()


class _Run:
    """The run that a command line describes, or its rehearsal."""

    def __init__(
        self,
        line: CommandLine,
        device: Literal["cuda", "cpu"],
        argv: list[str],
        rehearsal: "Observed | None" = None,
    ) -> None:
        if line.args.load is not None:
            line.args.load = str(checkpoint_folder(Path(line.args.load)))
        self._args: Namespace = line.args
        self._device = device
        self._argv = argv
        self._rehearsal = rehearsal
        self._folder = None
        self._notes: tuple[str, ...] = ()
        if line.args.switch_run_dir is not None:
            self._folder = RunFolder(Path(line.args.switch_run_dir))
            self._folder.check_ownership()
            self._notes = self._folder.apply(line.args, line.explicit)
        self._line = line
        if rehearsal is not None:
            self._folder = None
            rehearsal.prepare(line.args)
        self._set_here = fill_defaults(with_checkpoint_args(line), device)
        planned = device if rehearsal is None else rehearsal.dispatch_of
        self._switch = resolve_dispatch(line.args, SwitchConfig.from_args(line.args), planned)
        if rehearsal is not None:
            rehearsal.check(self._switch, line.args)

    def start(self) -> None:
        """Check everything, then train."""
        args = self._args
        if self._rehearsal is None:
            check_meeting_port(os.environ)
        self._notes += check_before_megatron(self._line, self._switch, self._device)
        layout = check_layout(args, self._switch)
        if args.rank == 0 and self._rehearsal is None:
            check_write_targets(args)
            if self._folder is not None:
                self._folder.lock()
        log_folder = None if self._folder is None else self._folder.log
        with Console(log_folder, rank=args.rank) as console:
            validate(args)
            check_schedule(args)
            if self._rehearsal is not None:
                self._rehearsal.validated(args)
            if self._folder is not None and args.rank == 0:
                self._folder.check_identity(args)
            if self._is_finished(console):
                return
            begin_megatron(args)
            self._notes += check_data(args)
            self._notes += find_what_to_load(args)
            model = model_config(args, self._switch)
            if self._rehearsal is None:
                self._check_memory(layout)
                if args.rank == 0:
                    self._take_places()
            self._announce(console, layout)
            with process_groups(args, layout), self._stage():
                # The first rank has found nothing to refuse, or it would not have come here.
                console.commit_log()
                open_log_writers(args)
                self._train(model, console)

    def _is_finished(self, console: Console) -> bool:
        """Return whether nothing is left to do, and say so."""
        finished = None if self._rehearsal is not None else find_finished(self._args)
        if finished is None:
            return False
        if finished.ends_here:
            console.say(finished.text)
        else:
            self._notes += (finished.text,)
        return finished.ends_here

    def _check_memory(self, layout: Layout) -> None:
        check_model_memory(
            self._args,
            layout,
            device=self._device,
            ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    def _take_places(self) -> None:
        """Make what the run writes to, now that nothing can refuse it."""
        make_write_targets(self._args)
        if self._folder is not None:
            self._folder.lock()

    def _stage(self) -> AbstractContextManager[None]:
        if self._rehearsal is None:
            return nullcontext()
        return self._rehearsal.on_stage(self._args, self._notes)

    def _announce(self, console: Console, layout: Layout) -> None:
        args = self._args
        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self._folder is not None and args.rank == 0:
            self._folder.describe(args, self._argv, self._device)
            table = table_as_csv(
                layout, num_experts=args.num_experts, ranks_per_node=ranks_per_node
            )
            self._folder.rank_table.write_text(table, encoding="utf-8")
        console.say(
            banner(
                args,
                self._switch,
                layout,
                device=self._device,
                ranks_per_node=ranks_per_node,
                set_here=self._set_here,
                log_text=console.log_text,
            )
        )
        for note in self._notes:
            console.say(note)

    def _train(self, model: Any, console: Console) -> None:
        args, switch = self._args, self._switch
        writer = self._writer()
        t5 = args.switch_arch == "t5"
        tracker = SwitchMetricsTracker(
            Architecture.from_args(args).sparse_layer_numbers,
            args.num_experts or 1,
            encoder_layers=args.num_layers if t5 else 0,
            on_report=self._on_report(writer, console),
            layer_interval=switch.metrics_interval,
        )
        set_moe_metrics_tracker(tracker)
        keyed = bool(args.num_experts and (args.moe_input_jitter_eps or switch.expert_dropout))
        progress = EvaluationProgress(args, console.say)
        forward_step = (T5ForwardStep if t5 else ForwardStep)(
            seed=args.seed, keyed=keyed, on_evaluation=progress.begin_micro_batch
        )
        evaluation = EvaluationReporter(tracker, forward_step, writer, progress)
        guard = self._guard(tracker, console)
        if guard is not None:
            model.transformer.finalize_model_grads_func = guard
        container = pretrain_cfg_container_from_args(args, model)
        try:
            pretrain(
                container,
                self._datasets_provider(),
                ModelType.encoder_or_decoder,
                forward_step,
                process_non_loss_data_func=evaluation.write,
                non_loss_data_func=evaluation.collect,
            )
        except RuntimeError as error:
            if guard is not None:
                guard.explain(error)
            raise
        except OSError as error:
            explain_full_disk(error, args)
            raise
        finally:
            if writer is not None:
                writer.finish_iteration()

    def _guard(self, tracker: SwitchMetricsTracker, console: Console) -> NonFiniteGuard | None:
        """Return what looks at router logits, if anything does."""
        action = self._switch.nonfinite
        captured = self._args.cuda_graph_impl == "full_iteration"  # the host cannot look inside
        if action == "ignore" or captured or not self._args.num_experts:
            return None
        return NonFiniteGuard(
            tracker, action=action, watch_gradients=not self._args.fp16, say=console.say
        )

    def _datasets_provider(self) -> Callable[..., Any]:
        others = None if self._rehearsal is None else self._rehearsal.datasets(self._args)
        if others is not None:
            return others
        return t5_datasets_provider if self._args.switch_arch == "t5" else datasets_provider

    def _on_report(
        self, writer: StepWriter | None, console: Console
    ) -> Callable[[RoutingReport, int], None]:
        """Return what is to happen with each step's routing on this rank."""
        args = self._args
        listeners: list[Callable[[RoutingReport, int], None]] = []
        if writer is not None:
            listeners.append(writer.add_routing)
        if args.rank == 0 and args.num_experts:
            num_sparse = len(Architecture.from_args(args).sparse_layer_numbers)
            facts = CapacityFacts.of(args, self._switch, num_sparse_layers=num_sparse)
            warm_up = max(args.lr_warmup_iters or 0, _SETTLING)
            listeners.append(DropWatch(facts, warm_up=warm_up, say=console.say))

        def tell(report: RoutingReport, iteration: int) -> None:
            for listener in listeners:
                listener(report, iteration)

        return tell

    def _writer(self) -> StepWriter | None:
        """Return the writer of the last rank, which is the one that Megatron logs from."""
        args = self._args
        if args.rank != args.world_size - 1:
            return None
        path = self._switch.metrics_file
        writer = StepWriter(
            replace_tensorboard_writer(None),
            None if path is None else MetricsFile(Path(path)),
            # Of a sample, for throughput: both sides of a t5.
            sequence_length=args.seq_length + (args.decoder_seq_length or 0),
            array_interval=self._switch.metrics_interval,
            clock=training_seconds,
        )
        replace_tensorboard_writer(writer)
        return writer
