"""Single-rank dry run: fake process groups, fake tensors, and the flags that work with them.

The rank runs the session that a launch runs, with the same checks in the same order. What does not
work without a GPU, without other ranks or without values is changed in one place each: flags in
:class:`DryRun`, functions in :mod:`megatron_switch.rehearsal.patches`, operators in
``_replaced_operators``.

Nothing is written: no checkpoint, no log, no run folder.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_switch.config import SwitchConfig
from megatron_switch.data.encoder_decoder import KEYS
from megatron_switch.errors import ConfigError
from megatron_switch.layout.grid import Layout
from megatron_switch.rehearsal.collective_trace import COLLECTIVES
from megatron_switch.rehearsal.observer import Implementation, Observation, StepObserver
from megatron_switch.rehearsal.patches import (
    fsdp_patches,
    offload_patches,
    sample_patches,
    single_rank_patches,
    step_patches,
)
from megatron_switch.rehearsal.shape_cache import ShapeCache
from megatron_switch.training.loop.hooks import Device, RunHooks
from megatron_switch.upstream.patching import applied
from megatron_switch.upstream.private import (
    DataDependentOutputException,
    FakeTensorMode,
    FakeWork,
    operator_schema,
)

_REFUSED = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
}
"""Flags that need a GPU's kernels, or take effect within Transformer Engine."""

_HELD_BACK = (
    "use_megatron_fsdp",
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    "fine_grained_activation_offloading",
)
"""Flags that a launch on GPUs may have, and that the checks of a run on the CPU would refuse."""

_ENGINE_EXPERTS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})

_SET: Mapping[str, object] = {
    "distributed_backend": "gloo",
    "fake_process_group": True,
    "transformer_impl": "local",
    "attention_dropout": 0.0,  # fused kernels keep a seed of it; the CPU's would keep a mask
    "tp_comm_overlap": False,
    "cuda_graph_impl": "none",
    "profile": False,
    "num_workers": 0,
    "eval_iters": 0,
    "switch_run_dir": None,
    "save": None,
    "async_save": False,
    "tensorboard_dir": None,
    "wandb_project": None,
    "switch_metrics_file": None,
    "exit_signal_handler": False,
}
"""Values of a rehearsed rank, whatever its flags say: it neither writes nor evaluates."""

ReportStep = Callable[[Observation, Sequence[str], Namespace], None]
"""Receives the observation of a step, what the session printed about the flags, the arguments."""


class ObservedRun(RunHooks):
    """A run as it is, that ends after its second step, which is observed.

    Args:
        report: Called once, before the session ends by SystemExit.
        observer: Observes; another one may run some operators in its own way.
    """

    def __init__(self, report: ReportStep, observer: StepObserver | None = None) -> None:
        self._observer = observer or StepObserver()
        self._report = report

    @contextmanager
    def training(self, args: Namespace, notes: Sequence[str]) -> Iterator[None]:
        """Observe while Megatron trains."""

        def report(observation: Observation) -> None:
            self._report(observation, notes, args)

        with applied(step_patches(self._observer, report)), self.tensors(), self._observer:
            yield

    def tensors(self) -> AbstractContextManager[Any]:
        """Return the block in which tensors are made."""
        return nullcontext()


class DryRun(ObservedRun):
    """One rank without the others, on tensors without values; nothing is written.

    Args:
        report: As for :class:`ObservedRun`.
    """

    def __init__(self, report: ReportStep) -> None:
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._has_experts = False
        self._held_back: dict[str, bool] = {}
        super().__init__(report, StepObserver(_replaced_operators(), ShapeCache(self._fakes).run))

    def session(self) -> AbstractContextManager[None]:
        """Return the block around the whole session, in which no other rank exists."""
        return applied(single_rank_patches(lambda: self._has_experts))

    def arguments_parsed(self, args: Namespace) -> None:
        """Change parsed arguments, in place, to what a rehearsal can run.

        Raises:
            ConfigError: A flag cannot be rehearsed.
        """
        self._has_experts = bool(args.num_experts)
        for name, flag in _REFUSED.items():
            if getattr(args, name):
                raise ConfigError(
                    f"{flag} cannot be rehearsed: it needs kernels of a GPU, or Transformer "
                    "Engine, which takes no tensors without values. Leave it out to rehearse the "
                    "rest."
                )
        if args.context_parallel_size > 1:
            raise ConfigError(
                "Context parallelism cannot be rehearsed, because its attention is Transformer "
                f"Engine's: got --context-parallel-size {args.context_parallel_size}. Rehearse "
                "with 1, or ask the planner."
            )
        self._held_back = {name: getattr(args, name) for name in _HELD_BACK}
        if args.fine_grained_activation_offloading:
            _check_offloading(args)
        for name, value in {**_SET, **dict.fromkeys(_HELD_BACK, False)}.items():
            setattr(args, name, value)

    def dispatch_device(self, device: Device) -> Device:
        """Return the device of the launch."""
        return "cuda"

    def settings_resolved(self, args: Namespace, switch: SwitchConfig) -> None:
        """Refuse routing whose shapes depend on values.

        Raises:
            ConfigError: Tokens are packed.
        """
        args.use_megatron_fsdp = self._held_back["use_megatron_fsdp"]
        if not args.num_experts or switch.dispatch == "padded":
            return
        raise ConfigError(
            "Packed dispatch cannot be rehearsed, because the number of tokens sent is known only "
            "when real ones are routed: got --switch-dispatch "
            f"{args.switch_dispatch}, --switch-capacity-group {switch.capacity_group}, "
            f"--moe-expert-capacity-factor {args.moe_expert_capacity_factor}. Rehearse with "
            "--switch-dispatch padded, a group other than ep and positive capacity factors."
        )

    def arguments_validated(self, args: Namespace) -> None:
        """Restore flags of the launch that Megatron would have refused for a run on the CPU."""
        for name, value in self._held_back.items():
            setattr(args, name, value)

    def find_finished(self, args: Namespace) -> None:
        """Return None: the step of a finished run can be rehearsed too."""

    def check_memory(self, args: Namespace, layout: Layout, device: Device) -> None:
        """Refuse nothing: tensors without values take no memory of this machine."""

    @contextmanager
    def training(self, args: Namespace, notes: Sequence[str]) -> Iterator[None]:
        """Observe while Megatron trains."""
        args.load = None  # the checkpoint was checked, and has no values to give
        # Only rank 0 finds out whether there are data, and cannot broadcast it.
        args.do_train = True
        shapes = {
            key: (args.micro_batch_size, *zeros.shape) for key, zeros in _sample(args).items()
        }
        memory = self._observer.memory
        with ExitStack() as stack:
            stack.enter_context(applied(sample_patches(shapes)))
            if args.optimizer_cpu_offload or args.fine_grained_activation_offloading:
                stack.enter_context(applied(offload_patches(memory)))
            if args.use_megatron_fsdp:
                stack.enter_context(applied(fsdp_patches(memory)))
            stack.enter_context(super().training(args, notes))
            yield

    def tensors(self) -> AbstractContextManager[Any]:
        """Return the block in which tensors have no values."""
        return self._fakes

    def datasets_provider(
        self, args: Namespace, provider: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return what provides Megatron with data sets of the right sizes and shapes, all zeros."""

        def provide(num_samples: list[int], vp_stage: int | None = None) -> list[_Zeros | None]:
            return [_Zeros(count, args) if count else None for count in num_samples]

        provide.is_distributed = True  # type: ignore[attr-defined]  # as those of a run are
        return provide


def _check_offloading(args: Namespace) -> None:
    """Refuse what a launch would refuse, and activations of modules that are not rehearsed."""
    if args.transformer_impl == "local":
        raise ConfigError(
            "Megatron offloads activations only beside Transformer Engine, got "
            "--fine-grained-activation-offloading and --transformer-impl local. Leave one out."
        )
    inside = sorted(_ENGINE_EXPERTS.intersection(args.offload_modules or ()))
    if inside:
        raise ConfigError(
            f"--offload-modules {' '.join(inside)} cannot be rehearsed: these are activations "
            "inside Transformer Engine's experts. Leave them out to rehearse the rest."
        )


class _Zeros(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int, args: Namespace) -> None:
        self._count = count
        self._args = args

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return _sample(self._args)


def _sample(args: Namespace) -> dict[str, Tensor]:
    """Return a sample as the data sets of the architecture make it, all zeros."""
    length = args.seq_length
    if args.switch_arch == "t5":
        lengths = {key: length if "encoder" in key else args.decoder_seq_length for key in KEYS}
        return {key: torch.zeros(size, dtype=torch.int64) for key, size in lengths.items()}
    sample = {
        "tokens": torch.zeros(length, dtype=torch.int64),
        "labels": torch.zeros(length, dtype=torch.int64),
        "loss_mask": torch.zeros(length),
        "position_ids": torch.zeros(length, dtype=torch.int64),
    }
    if args.create_attention_mask_in_dataloader:
        sample["attention_mask"] = torch.zeros(1, length, length, dtype=torch.bool)
    return sample


def _replaced_operators() -> dict[Any, Implementation]:
    """Return implementations of the operators that need other ranks, or values."""
    return {
        **dict.fromkeys(COLLECTIVES, _complete_at_once),
        torch.ops.aten._local_scalar_dense.default: _read_scalar,
        # Called more often than all others together; torch's own way takes longer.
        torch.ops.prim.device.default: lambda op, args, kwargs: args[0].fake_device,
    }


def _complete_at_once(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a collective returns, completed: its first tensors where it returns any."""
    work = FakeWork().boxed()
    return work if len(operator_schema(op).returns) == 1 else (args[0], work)


def _read_scalar(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a number that the host reads: its value where a fake tensor knows it, else a guess.

    The guesses: True, states agree; 0, nothing was counted; 1.0, a norm that is clipped.
    """
    try:
        return op(*args, **kwargs)
    except DataDependentOutputException:
        dtype = args[0].dtype
        return 1.0 if dtype.is_floating_point else dtype == torch.bool
