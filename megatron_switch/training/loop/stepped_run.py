"""A training run taken step by step, for callers that inspect it between the steps.

It trains as ``megatron-switch train`` does: the same parsing, checks, model, groups, data-parallel
wrapper, optimizer, schedules and forward step, and Megatron's own ``train_step``. Data sets,
checkpoints and logs are left out.

Guaranteed: after the block, Megatron's global state is gone and its process groups are destroyed,
so that another run, with other flags and another layout, can begin in the same process.
``torch.distributed`` itself belongs to the caller.
"""

import copy
import io
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import set_moe_metrics_tracker
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import get_timers
from megatron.training import training as megatron
from megatron.training.argument_utils import pretrain_cfg_container_from_args

from megatron_switch import parallel_state
from megatron_switch.architecture.model import Architecture
from megatron_switch.config import SwitchConfig
from megatron_switch.moe.metrics.routing_counts import RoutingReport
from megatron_switch.moe.metrics.tracker import SwitchMetricsTracker
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.arguments.parser import CommandLine
from megatron_switch.training.loop.forward_step import ForwardStep
from megatron_switch.training.loop.global_state import begin_megatron, validate
from megatron_switch.training.loop.gpt_builder import model_config, resolve_dispatch
from megatron_switch.training.preflight.flags import check_before_megatron
from megatron_switch.training.preflight.layout import check_layout
from megatron_switch.upstream.private import model_parallel_groups

Batches = Callable[[int, int], Iterator[Any]]
"""``(rank, size) -> samples``: the micro-batches of one data-parallel rank, in order."""


@dataclass(frozen=True)
class StepHooks:
    """Calls of an observer; by default they do nothing."""

    arguments: Callable[[Namespace], None] = field(default=lambda args: None)
    """Changes Megatron's arguments once they are validated."""
    layers: Callable[[TransformerBlockSubmodules], TransformerBlockSubmodules] = field(
        default=lambda layers: layers
    )
    """Replaces parts of the layers of a stage before they are built."""
    start: Callable[[Sequence[torch.nn.Module]], None] = field(default=lambda chunks: None)
    """Receives the model's chunks before they are wrapped."""
    gradients: Callable[[], None] = field(default=lambda: None)
    """Called in every step when all gradients are complete and not yet clipped."""


@dataclass(frozen=True)
class Outcome:
    """What a training step or an evaluation logs."""

    loss: float | None
    """Mean cross-entropy; only the ranks of the last pipeline stage know it."""
    routing: RoutingReport
    grad_norm: float | None = None
    """Before clipping; None of an evaluation."""


class SteppedRun:
    """A run between two of its steps."""

    def __init__(
        self, args: Namespace, model: list[Any], optimizer: Any, scheduler: Any, batches: Batches
    ) -> None:
        self.args = args
        self.model = model
        self.optimizer = optimizer
        self._scheduler = scheduler
        self._config = get_model_config(model[0])
        self._batches = batches
        self._training_data = self._iterators(batches)
        self._forward_step = ForwardStep(seed=args.seed, keyed=False)
        self._reports: list[RoutingReport] = []
        self._tracker = SwitchMetricsTracker(
            Architecture.from_args(args).sparse_layer_numbers,
            args.num_experts,
            on_report=lambda report, iteration: self._reports.append(report),
        )
        set_moe_metrics_tracker(self._tracker)
        self._iteration = 0
        self._gathers_late = megatron.should_disable_forward_pre_hook(args)
        self._param_sync = None

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The model chunks of this rank, unwrapped."""
        chunks: list[torch.nn.Module] = unwrap_model(self.model)
        return chunks

    def prepare(self, on_gradients: Callable[[], None]) -> None:
        """Do what Megatron's loop does before its first step."""
        args, config = self.args, self._config
        for chunk in self.model:
            chunk.train()
        config.grad_scale_func = self.optimizer.scale_loss
        config.timers = get_timers()
        if args.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.model])
            if args.align_grad_reduce:
                syncs = [chunk.start_grad_sync for chunk in self.model]
                config.grad_sync_func = _one_or_all(syncs)
        if args.overlap_param_gather and args.align_param_gather:
            config.param_sync_func = _one_or_all([c.start_param_sync for c in self.model])
        config.finalize_model_grads_func = partial(_finalize, on_gradients)
        if self._gathers_late:
            self._stop_gathering(param_sync=False)

    def step(self) -> Outcome:
        """Take one training step."""
        args = self.args
        args.curr_iteration = self._iteration
        update_num_microbatches(args.consumed_train_samples, verbose=False)
        losses, skipped, _, _, _, grad_norm, *_ = megatron.train_step(
            self._forward_step,
            self._training_data,
            self.model,
            self.optimizer,
            self._scheduler,
            self._config,
            get_forward_backward_func(),
            iteration=self._iteration,
        )
        assert not skipped, f"step {self._iteration} was skipped"
        if self._gathers_late and self._iteration == 0:
            self._gather_again()
        self._iteration += 1
        args.consumed_train_samples += args.global_batch_size
        self._tracker.report(loss_scale=1.0, iteration=self._iteration)
        return Outcome(_loss(losses), self._reports[-1], float(grad_norm))

    def evaluate(self, batches: Batches) -> Outcome:
        """Run ``--eval-iters`` evaluation steps in between."""
        gathers = self._gathers_late and self._iteration > 0
        if gathers:
            self._stop_gathering(param_sync=True)
        losses, _, _ = megatron.evaluate(
            self._forward_step, self._iterators(batches), self.model, None, self._config
        )
        if gathers:
            self._gather_again()
        routing = self._tracker.report_evaluation()
        assert routing is not None
        return Outcome(_loss(losses), routing)

    def sync_parameters(self) -> None:
        """Bring the parameters up to date on every rank, as before a checkpoint."""
        if self._gathers_late:
            megatron.force_param_sync(self.model, self.optimizer)

    def _iterators(self, batches: Batches) -> Any:
        """Return what a schedule reads from: an iterator, or one a chunk."""
        place = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        reads = mpu.get_tensor_model_parallel_rank() == 0
        iterators = [batches(*place) if reads else None for _ in self.model]
        return _one_or_all(iterators)

    def _stop_gathering(self, *, param_sync: bool) -> None:
        megatron.disable_forward_pre_hook(self.model, self.optimizer, param_sync=param_sync)
        self._param_sync, self._config.param_sync_func = self._config.param_sync_func, None

    def _gather_again(self) -> None:
        megatron.enable_forward_pre_hook(self.model)
        self._config.param_sync_func = self._param_sync


@contextmanager
def stepped_run(
    given: CommandLine, device: Literal["cuda", "cpu"], batches: Batches, hooks: StepHooks
) -> Iterator[SteppedRun]:
    """Begin a run for the length of a ``with`` block; every rank must.

    Args:
        given: The parsed flags; they are copied, so that one parse can serve several runs.
        device: Where the run happens; on the CPU, inside the emulation.
        batches: The training data.
        hooks: Called during the run.

    Yields:
        The run before its first step.

    Raises:
        SwitchError: The flags cannot work.
    """
    environment = dict(os.environ)
    line = copy.deepcopy(given)
    line.args.rank, line.args.world_size = dist.get_rank(), dist.get_world_size()
    line.args.local_rank = int(os.environ["LOCAL_RANK"])
    fill_defaults(line, device)
    args = line.args
    switch = resolve_dispatch(args, SwitchConfig.from_args(args), device)
    check_before_megatron(line, switch, device)
    layout = check_layout(args, switch)
    with redirect_stdout(io.StringIO()):  # Megatron prints much at start-up
        validate(args)
        hooks.arguments(args)
        begin_megatron(args)
        config = _observed(model_config(args, switch), hooks)
        parallel_state.initialize_model_parallel_as_pretrain(layout, vars(args))
        megatron.initialize_megatron()
        model, optimizer, scheduler = megatron.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=pretrain_cfg_container_from_args(args, config),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        run = SteppedRun(args, model, optimizer, scheduler, batches)
        run.prepare(hooks.gradients)
        yield run
        _destroy_global_state()
    os.environ.clear()
    os.environ.update(environment)  # Megatron sets variables that select attention kernels


def _observed(config: Any, hooks: StepHooks) -> Any:
    """Call the hooks for layers before they are built, and for chunks before they are wrapped."""
    build = config.transformer_layer_spec

    def layer_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        return hooks.layers(build(config, vp_stage=vp_stage))

    def start(chunks: list[Any]) -> list[Any]:
        hooks.start(chunks)
        return chunks

    config.transformer_layer_spec = layer_spec
    config.pre_wrap_hooks = [start]
    return config


def _finalize(on_gradients: Callable[[], None], *args: Any, **kwargs: Any) -> None:
    finalize_model_grads(*args, **kwargs)
    on_gradients()


def _one_or_all(values: list[Any]) -> Any:
    """Return model chunks in Megatron's form: a list, or the only chunk itself."""
    return values[0] if len(values) == 1 else values


def _loss(losses: dict[str, Any]) -> float | None:
    return float(losses["lm loss"]) if losses else None


def _destroy_global_state() -> None:
    """Undo what a run has set in this process; not called on failure, when peers may have ended."""
    # First, while Megatron still lists them: it destroys only a few of these groups itself.
    for group in model_parallel_groups():
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    megatron.destroy_global_state()
