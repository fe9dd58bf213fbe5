"""The stage on which one rank plays alone: fake groups, fake tensors, and the flags that go there.

The rank runs the session that a launch runs, with the same checks in the same order. What cannot
take place without a GPU, without other ranks or without values is changed in one place each:
flags here, functions in :mod:`megatron_switch.rehearsal.patches`, operators in ``_answers``.

Nothing is written: no checkpoint, no log, no run folder.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_switch.config import SwitchConfig
from megatron_switch.data.encoder_decoder import KEYS
from megatron_switch.errors import ConfigError
from megatron_switch.rehearsal.collective_trace import COLLECTIVES
from megatron_switch.rehearsal.fsdp import cut_over_ranks
from megatron_switch.rehearsal.host_offload import host_memory
from megatron_switch.rehearsal.observer import Answer, Observation, StepObserver
from megatron_switch.rehearsal.patches import known_samples, observed_steps, one_of_many_ranks
from megatron_switch.rehearsal.shape_cache import ShapeMemory
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
"""Flags that need a GPU's kernels, or decide within Transformer Engine."""

_HELD_BACK = (
    "use_megatron_fsdp",
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    "fine_grained_activation_offloading",
)
"""What a launch on GPUs may have, while the checks of a run on the CPU would refuse it."""

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
    "save": None,
    "async_save": False,
    "tensorboard_dir": None,
    "wandb_project": None,
    "switch_metrics_file": None,
    "exit_signal_handler": False,
}
"""What a rehearsed rank has, whatever its flags say: it neither writes nor evaluates."""


Report = Callable[[Observation, Sequence[str], Namespace], None]
"""Receives what was seen of a step, what the session noted of the flags, Megatron's arguments."""


class Observed:
    """What the training session does otherwise while its second step is watched: nothing more.

    Args:
        report: Called once, before the session ends by SystemExit.
        observer: What watches; another one answers some operators itself.
    """

    dispatch_of: Literal["cuda", "cpu"] = "cpu"
    """The device for which ``--switch-dispatch auto`` is resolved."""

    def __init__(self, report: Report, observer: StepObserver | None = None) -> None:
        self._observer = observer or StepObserver()
        self._report = report

    def prepare(self, args: Namespace) -> None:
        """Change parsed arguments, in place."""

    def check(self, switch: SwitchConfig, args: Namespace) -> None:
        """Refuse what cannot take place here; Switch settings are resolved."""

    def validated(self, args: Namespace) -> None:
        """Change arguments that Megatron has checked, in place."""

    def surroundings(self) -> AbstractContextManager[None]:
        """Return the block around the whole session."""
        return nullcontext()

    @contextmanager
    def on_stage(self, args: Namespace, notes: Sequence[str]) -> Iterator[None]:
        """Watch while Megatron trains.

        Args:
            args: Validated arguments.
            notes: What the session has to say of the flags.
        """

        def report(observation: Observation) -> None:
            self._report(observation, notes, args)

        with observed_steps(self._observer, report), self.tensors(), self._observer:
            yield

    def tensors(self) -> AbstractContextManager[Any]:
        """Return the block in which tensors are made."""
        return nullcontext()

    def datasets(self, args: Namespace) -> Callable[..., Any] | None:
        """Return what provides Megatron with data sets; None for those of a run."""
        return None


class Rehearsal(Observed):
    """What the session does otherwise for a rank that plays alone, on tensors without values."""

    dispatch_of = "cuda"

    def __init__(self, report: Report) -> None:
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._has_experts = False
        self._held_back: dict[str, bool] = {}
        super().__init__(report, StepObserver(_answers(), ShapeMemory(self._fakes).run))

    def prepare(self, args: Namespace) -> None:
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

    def check(self, switch: SwitchConfig, args: Namespace) -> None:
        """Refuse routing whose shapes depend on values.

        Raises:
            ConfigError: Tokens are packed.
        """
        args.use_megatron_fsdp = self._held_back["use_megatron_fsdp"]
        if not args.num_experts or switch.dispatch == "padded":
            return
        raise ConfigError(
            "Packed dispatch cannot be rehearsed, because how many tokens travel is known only "
            "when real ones are routed: got --switch-dispatch "
            f"{args.switch_dispatch}, --switch-capacity-group {switch.capacity_group}, "
            f"--moe-expert-capacity-factor {args.moe_expert_capacity_factor}. Rehearse with "
            "--switch-dispatch padded, a group other than ep and positive capacity factors."
        )

    def validated(self, args: Namespace) -> None:
        """Let the launch have what Megatron would have refused beside plain torch modules."""
        for name, value in self._held_back.items():
            setattr(args, name, value)

    def surroundings(self) -> AbstractContextManager[None]:
        """Return the block around the whole session: there is no other rank in it."""
        return one_of_many_ranks(lambda: self._has_experts)

    @contextmanager
    def on_stage(self, args: Namespace, notes: Sequence[str]) -> Iterator[None]:
        """Watch while Megatron trains."""
        args.load = None  # what it would load was checked, and has no values to give
        # Rank 0 alone knows whether there are data, and cannot tell.
        args.do_train = True
        sizes = {key: (args.micro_batch_size, *zeros.shape) for key, zeros in _sample(args).items()}
        with known_samples(sizes), self._savings(args), super().on_stage(args, notes):
            yield

    @contextmanager
    def _savings(self, args: Namespace) -> Iterator[None]:
        """Let Megatron keep tensors elsewhere than on this rank's device, as flags say."""
        memory = self._observer.memory
        with ExitStack() as stack:
            if args.optimizer_cpu_offload or args.fine_grained_activation_offloading:
                stack.enter_context(host_memory(memory))
            if args.use_megatron_fsdp:
                stack.enter_context(cut_over_ranks(memory))
            yield

    def tensors(self) -> AbstractContextManager[Any]:
        """Return the block in which tensors have no values."""
        return self._fakes

    def datasets(self, args: Namespace) -> Callable[..., Any]:
        """Return what provides Megatron with data sets of the right sizes and shapes, all zeros."""

        def provide(num_samples: list[int], vp_stage: int | None = None) -> list[_Zeros | None]:
            return [_Zeros(count, args) if count else None for count in num_samples]

        provide.is_distributed = True  # type: ignore[attr-defined]  # as those of a run are
        return provide


def _check_offloading(args: Namespace) -> None:
    """Refuse what a launch would refuse, and activations that no rehearsed module has."""
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


def _answers() -> dict[Any, Answer]:
    """Return what is done in the place of operators that need other ranks, or values."""
    return {
        **dict.fromkeys(COLLECTIVES, _done_at_once),
        torch.ops.aten._local_scalar_dense.default: _read,
        # Asked more often than all others together; the long way round gives the same.
        torch.ops.prim.device.default: lambda op, args, kwargs: args[0].fake_device,
    }


def _done_at_once(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a collective returns, finished: its first tensors where it returns any."""
    work = FakeWork().boxed()
    return work if len(operator_schema(op).returns) == 1 else (args[0], work)


def _read(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a number that the host reads: what it is if that was known before, or else a guess.

    True, that states agree; 0, that nothing was counted; 1.0, which as a norm is one that clips.
    """
    try:
        return op(*args, **kwargs)
    except DataDependentOutputException:
        dtype = args[0].dtype
        return 1.0 if dtype.is_floating_point else dtype == torch.bool
