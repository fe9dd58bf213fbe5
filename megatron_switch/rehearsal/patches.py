"""Every patch that a rehearsal applies; each list is applied by a block of its own.

:func:`step_patches`
    Megatron's training step is taken twice, observed the second time, and ends the run. They serve
    a real run as well as a rehearsal.
:func:`single_rank_patches`
    What a process without other ranks, on tensors without values, cannot do. The answers have no
    part in a step's memory or messages: groups of other ranks, objects of other ranks, times,
    random states.
:func:`sample_patches`
    A rank knows the shapes of the data that another one reads for it.
:func:`offload_patches`
    Megatron offloads to a host whose memory is counted apart.
:func:`fsdp_patches`
    Megatron-FSDP finds out which ranks share what with small tensors of rank numbers, which must
    have values; and it frees gathered weights without an operator, which must be counted.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor, nn

from megatron_switch.rehearsal.host_offload import HostAndDevice
from megatron_switch.rehearsal.memory import LiveMemory
from megatron_switch.rehearsal.observer import Observation, StepObserver
from megatron_switch.upstream.patching import Patch
from megatron_switch.upstream.private import without_dispatch_modes

_ALONE = "the other ranks are not there to answer"
_NO_VALUES = "a rehearsed tensor has no values"
_ONE_DEVICE = "it looks for CUDA tensors, and a rehearsed tensor is the CPU's"
_RANKS = "rank numbers must have values"

_SIZES_PER_ENTRY = 5
"""How many sizes Megatron sends of each entry of a sample."""
_EXPERT_WEIGHTS = (None, True)
"""Megatron's key of the experts' parameters: nothing overridden, and of experts."""

_OPTIMIZER = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer."
_ACTIVATIONS = "megatron.core.pipeline_parallel.fine_grained_activation_offload:"
_FSDP = "megatron.core.distributed.fsdp."
_FSDP_BUFFER = f"{_FSDP}src.megatron_fsdp.param_and_grad_buffer:"
_DEVICE_MESH = "torch.distributed.device_mesh:DeviceMesh."


def step_patches(
    observer: StepObserver, report: Callable[[Observation], None]
) -> tuple[Patch, ...]:
    """Let training end after its second step.

    Args:
        observer: Entered already when the model is built.
        report: Receives the observation of that step, before :class:`SystemExit` with code 0.
    """
    return (
        Patch(
            "megatron.training.training:train_step",
            "one step is to be observed, after one that lets the optimizer allocate its state",
            wrapper=lambda original: observer.observing(original, report),
            sha256=("68989d425b2300aa0b193d9c93c881775be99bd3c70aeb4fe9d9b9f4c0671726",),
        ),
    )


def single_rank_patches(others_have_experts: Callable[[], bool]) -> tuple[Patch, ...]:
    """Answer for the ranks that do not exist.

    Args:
        others_have_experts: Whether the model has experts, once that is known.
    """
    return (
        Patch(
            "torch.distributed:new_group",
            "a group of other ranks is never used here, and thousands of them take minutes",
            wrapper=_of_this_rank_only,
        ),
        Patch(
            "torch.distributed:all_gather_object",
            _ALONE,
            partial(_all_like_this_one, others_have_experts),
        ),
        Patch("torch.nn:Module._apply", "it swaps tensors, which fake ones do not allow", _apply),
        Patch(
            "megatron.core.optimizer.clip_grads:l2_norm_impl",
            f"it makes a tensor of numbers that it reads, and {_NO_VALUES}",
            _l2_norm,
            alias_of="megatron.core.utils:local_multi_tensor_l2_norm",
        ),
        Patch(
            "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer."
            "_unscale_main_grads_and_check_for_nan",
            f"it leaves out a step whose gradients overflow, and {_NO_VALUES}",
            wrapper=_without_overflow,
            sha256=("0cb7a5fb6d0d59d63c2ec4eb4fe85eaec51a32ef8d78ab078f3b1728234e1d42",),
        ),
        Patch(
            "megatron.core.timers:Timers.log",
            _ALONE,
            lambda self, *args, **kwargs: None,
            sha256=("b3e00af358507f303035a86ce6129f8900fce5ece3845c79386be22e2b5c33dc",),
        ),
        Patch(
            "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
            "random states are values",
            lambda self, name="": nullcontext(),
            sha256=("6821e1e397253d43b111f5cb8f7feab6301faacf24deaece01416a7c644322d5",),
        ),
    )


def sample_patches(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Patch, ...]:
    """Let every rank know the shapes of a micro-batch, which the first rank would send.

    Args:
        shapes: Shape of each entry of a micro-batch.
    """

    def known_sizes(keys: Sequence[str], data: Any, tp_group: Any = None) -> Any:
        group = mpu.get_tensor_model_parallel_group() if tp_group is None else tp_group
        sizes = torch.zeros(len(keys) * _SIZES_PER_ENTRY, dtype=torch.int64, device="cuda")
        # Broadcast all the same: it is one of the step's messages.
        dist.broadcast(sizes, dist.get_process_group_ranks(group)[0], group=group)
        found = {key: list(shapes[key]) for key in keys}
        counts = {key: math.prod(size) for key, size in found.items()}
        return found, counts, sum(counts.values())

    return (
        Patch(
            "megatron.core.tensor_parallel.data:_build_key_size_numel_dictionaries",
            f"it reads the sizes that the first rank sends, and {_NO_VALUES}",
            known_sizes,
            sha256=("7ab1ec340cdb6aa60da41b19e75d127b2c30fa7c4ad678029f727e8276e78ec7",),
        ),
    )


def offload_patches(memory: LiveMemory) -> tuple[Patch, ...]:
    """Let Megatron offload to a host whose memory is counted apart.

    Args:
        memory: What counts.
    """

    def moving(original: Callable[..., Any]) -> Callable[..., Any]:
        def with_two_devices(*args: Any, **kwargs: Any) -> Any:
            with HostAndDevice(memory):
                return original(*args, **kwargs)

        return with_two_devices

    def can_be_moved(tensor: Any) -> bool:
        return not isinstance(tensor, nn.Parameter) and not memory.is_on_host(tensor)

    def releasing(original: Callable[..., Any]) -> Callable[..., Any]:
        def bulk_offload(self: Any, name: str, forced_released_tensors: list[Tensor]) -> None:
            with HostAndDevice(memory):
                original(self, name, forced_released_tensors)
            for tensor in forced_released_tensors:
                memory.resized(tensor)

        return bulk_offload

    return (
        Patch(
            f"{_OPTIMIZER}_get_sub_optimizer_param_groups",
            _ONE_DEVICE,
            wrapper=moving,
            sha256=("dc36f8e0ea822d462f27917b3842a886f939444c25d5cd340a65d796674fd122",),
        ),
        Patch(
            f"{_OPTIMIZER}_set_sub_optimizer_grads",
            _ONE_DEVICE,
            wrapper=moving,
            sha256=("23db46047e1d3238e8ca29dd74abb8bfc065453945e6c58189226ddaa6ee5724",),
        ),
        Patch(
            "megatron.core.pipeline_parallel.utils:set_ideal_affinity_for_current_gpu",
            "there is no GPU to be near",
            lambda: None,
            sha256=("6dd80d888b9cf72191fd384cfdc2d6c6fac5ef62562013c05eb700e025ba982d",),
        ),
        Patch(
            f"{_ACTIVATIONS}ChunkOffloadHandler._can_manage_tensor_for_offload",
            "it leaves out tensors without values",
            staticmethod(can_be_moved),
            sha256=("20d546c67b80fbf7e7a18e8fdff5cd49b6f479d216d4f7590d7a6cceaadb45a1",),
        ),
        Patch(
            f"{_ACTIVATIONS}ChunkOffloadHandler.bulk_offload",
            "it frees memory of tensors, which must be counted",
            wrapper=releasing,
            sha256=("b661c749e88bd20b1d969c1e2615b65390171d9f0c9c5f8c8ab901770f88b46a",),
        ),
        *(
            Patch(
                f"{_ACTIVATIONS}PipelineOffloadManager.{name}",
                "it lets Transformer Engine, which is not rehearsed, offload as well",
                replacement,
                sha256=(source,),
            )
            for name, replacement, source in (
                (
                    "__enter__",
                    _enter,
                    "41fd7ed28325be3deeff57bccde3b543619c583b50df4464d742d17ee474a560",
                ),
                (
                    "__exit__",
                    _leave,
                    "c475203f7cd2e0e8bd3f50af847a711c564a917bc3ca73543291dc122b0921a5",
                ),
            )
        ),
    )


def fsdp_patches(memory: LiveMemory) -> tuple[Patch, ...]:
    """Let Megatron-FSDP work on tensors without values.

    Args:
        memory: What counts.
    """

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def resize(tensor: Tensor, *size: Any) -> None:
            original(tensor, *size)
            memory.resized(tensor)

        return resize

    def gathering(original: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_bucket_storage(self: Any, *args: Any, **kwargs: Any) -> Any:
            with memory.making("gathered"):
                return original(self, *args, **kwargs)

        return allocate_bucket_storage

    return (
        Patch(f"{_DEVICE_MESH}__init__", _RANKS, wrapper=_with_values),
        Patch(f"{_DEVICE_MESH}mesh", _RANKS, wrapper=_property_with_values),
        Patch(
            f"{_FSDP}mcore_fsdp_adapter:FullyShardedDataParallel._init_dist_index",
            _RANKS,
            wrapper=_with_values,
            sha256=("71a8eb4fd53bd0ac5e4f32a644a8d9184a1a6e14e7b470bf385dc57ceea28f69",),
        ),
        Patch(
            f"{_FSDP_BUFFER}DataParallelBuffer.allocate_bucket_storage",
            "whole weights and gradients are counted apart",
            wrapper=gathering,
            sha256=("fd379a7dd35732ee5cdddc9a0a01f0473eebed10a04003ba00ef6389047fb4af",),
        ),
        Patch(
            f"{_FSDP_BUFFER}_alloc_storage",
            "it allocates memory, which must be counted",
            wrapper=counted,
            sha256=("6e3eec2dffd9b5c9cd9a50afa7c74a564dcdebe07fec80775bfa71a23d23e352",),
        ),
        Patch(
            f"{_FSDP_BUFFER}_free_storage",
            "it frees memory, which must be counted",
            wrapper=counted,
            sha256=("5da14a49139478d7779dcae1764be01e82bbb82e9a6ca604c6e9f8ccad002501",),
        ),
    )


def _of_this_rank_only(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return original(ranks, *args, **kwargs)

    return new_group


def _all_like_this_one(
    others_have_experts: Callable[[], bool],
    object_list: list[Any],
    obj: Any,
    group: Any = None,
    **kwargs: Any,
) -> None:
    """Gather objects as if every other rank sent the same as this one.

    Except where ranks agree on the optimizer's groups of parameters - pairs of (overrides, of
    experts): there a stage without experts receives the experts' group of the others.
    """
    object_list[:] = [obj] * len(object_list)
    keys = [key for key in obj if isinstance(key, tuple)] if isinstance(obj, list) else []
    if keys and others_have_experts():
        object_list[-1] = [*keys, _EXPERT_WEIGHTS]


def _without_overflow(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def _unscale_main_grads_and_check_for_nan(self: Any) -> bool:
        original(self)
        return False

    return _unscale_main_grads_and_check_for_nan


def _l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool, *_: Any
) -> tuple[Tensor, None]:
    norms = [torch.norm(tensor) for tensors in tensor_lists for tensor in tensors]
    return torch.norm(torch.stack(norms)).float().view(1), None


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Convert in place: torch would swap the tensors, and refuses where weak references exist."""
    modules = self.modules() if recurse else [self]
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    converted = fn(parameter)
                if converted is not parameter:
                    parameter.data = converted
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
    return self


def _enter(self: Any) -> None:
    if _offloads(self):
        self.inside_context = True
        self._saved_tensors_hooks.__enter__()


def _leave(self: Any, *args: Any) -> None:
    if _offloads(self):
        self.inside_context = False
        self._saved_tensors_hooks.__exit__()


def _offloads(manager: Any) -> bool:
    chunk = manager.cur_forward_chunk()
    return chunk is not None and chunk.do_offload


def _with_values(original: Callable[..., Any]) -> Callable[..., Any]:
    def real(*args: Any, **kwargs: Any) -> Any:
        with without_dispatch_modes():
            return original(*args, **kwargs)

    return real


def _property_with_values(original: property) -> property:
    assert original.fget is not None
    return property(_with_values(original.fget))
