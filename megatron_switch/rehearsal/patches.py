"""Every patch that a rehearsal applies, and the blocks that apply them.

Three lists, all hash-checked and undone when their block is left:

* :func:`observed_steps` replaces Megatron's training step by one that is taken twice, watched the
  second time, and ends training there. It serves a real run as well as a rehearsal.
* :func:`one_of_many_ranks` answers what a process without other ranks, on tensors without values,
  cannot do. What is answered has no part in a step's memory or messages: groups of other ranks,
  objects of other ranks, times, random states.
* :func:`known_samples` tells a rank the shapes of the data that another one reads for it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from megatron_switch.rehearsal.observer import Observation, StepObserver
from megatron_switch.upstream.patching import Patch, applied

_ALONE = "the other ranks are not there to answer"
_MOST_DIMS = 5  # how many sizes Megatron sends of each entry
_EXPERT_WEIGHTS = (None, True)
"""Megatron's key of the experts' parameters: nothing overridden, and of experts."""

_NO_VALUES = "a rehearsed tensor has no values"


@contextmanager
def observed_steps(observer: StepObserver, report: Callable[[Observation], None]) -> Iterator[None]:
    """Let training end after its second step, and hand over what was seen of that step.

    Args:
        observer: Entered already when the model is built.
        report: Called once, before training ends by :class:`SystemExit` with code 0.

    Raises:
        UpstreamError: The installed Megatron-Core is not what the patch was checked against.
    """
    with applied(step_patches(observer, report)):
        yield


@contextmanager
def one_of_many_ranks(others_have_experts: Callable[[], bool]) -> Iterator[None]:
    """Answer for the ranks that are not there, for the length of a block.

    Args:
        others_have_experts: Whether the model has experts, once that is known.

    Raises:
        UpstreamError: The installed torch or Megatron-Core is not what the patches were checked
            against; nothing has been changed.
    """
    with applied(rehearsal_patches(others_have_experts)):
        yield


@contextmanager
def known_samples(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Let every rank know the shapes of a micro-batch, which others would be told by the first.

    Args:
        shapes: Shape of each entry of a micro-batch.

    Raises:
        UpstreamError: The installed Megatron-Core is not what the patch was checked against.
    """
    with applied(sample_patches(shapes)):
        yield


def sample_patches(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Patch, ...]:
    """Return the patches of :func:`known_samples`, without applying them."""

    def sizes(keys: Sequence[str], data: Any, tp_group: Any = None) -> Any:
        group = mpu.get_tensor_model_parallel_group() if tp_group is None else tp_group
        told = torch.zeros(len(keys) * _MOST_DIMS, dtype=torch.int64, device="cuda")
        dist.broadcast(told, dist.get_process_group_ranks(group)[0], group=group)
        found = {key: list(shapes[key]) for key in keys}
        counts = {key: math.prod(size) for key, size in found.items()}
        return found, counts, sum(counts.values())

    return (
        Patch(
            "megatron.core.tensor_parallel.data:_build_key_size_numel_dictionaries",
            f"it reads the sizes that the first rank sends, and {_NO_VALUES}",
            sizes,
            sha256=("7ab1ec340cdb6aa60da41b19e75d127b2c30fa7c4ad678029f727e8276e78ec7",),
        ),
    )


def step_patches(
    observer: StepObserver, report: Callable[[Observation], None]
) -> tuple[Patch, ...]:
    """Return the patches of :func:`observed_steps`, without applying them."""

    def observed(original: Callable[..., Any]) -> Callable[..., Any]:
        return _observed(original, observer, report)

    return (
        Patch(
            "megatron.training.training:train_step",
            "one step is to be watched, after one that lets the optimizer allocate its state",
            wrapper=observed,
            sha256=("68989d425b2300aa0b193d9c93c881775be99bd3c70aeb4fe9d9b9f4c0671726",),
        ),
    )


def rehearsal_patches(others_have_experts: Callable[[], bool]) -> tuple[Patch, ...]:
    """Return the patches of :func:`one_of_many_ranks`, without applying them."""
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
        Patch("torch.nn:Module._apply", "it exchanges tensors without values, and cannot", _apply),
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


def _observed(
    original: Callable[..., Any], observer: StepObserver, report: Callable[[Observation], None]
) -> Callable[..., Any]:
    def train_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        config: Any,
        forward_backward_func: Any,
        **kwargs: Any,
    ) -> Any:
        def step(forward_backward: Callable[..., Any]) -> None:
            original(
                forward_step_func,
                data_iterator,
                model,
                optimizer,
                opt_param_scheduler,
                config,
                forward_backward,
                **kwargs,
            )

        def short(*, num_microbatches: int, **named: Any) -> Any:
            # As many as every schedule can work with: one for each stage. Offloading learns in
            # its first step what the others are like.
            fewest = min(num_microbatches, config.pipeline_model_parallel_size)
            if config.fine_grained_activation_offloading:
                fewest = num_microbatches
            return forward_backward_func(num_microbatches=fewest, **named)

        def watched(**named: Any) -> Any:
            observer.memory.in_forward_backward = True
            try:
                return forward_backward_func(**named)
            finally:
                observer.memory.in_forward_backward = False

        step(short)
        _gather_while_computing(model, config)
        state = observer.begin(model, optimizer)
        step(watched)
        report(observer.end(model, state))
        raise SystemExit(0)

    return train_step


def _gather_while_computing(model: Sequence[nn.Module], config: Any) -> None:
    """Let forward passes gather the weights from now on, as Megatron's loop does after one step."""
    chunks = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel)]
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
            chunk.enable_forward_pre_hook()
            if chunk.ddp_config.align_param_gather:
                syncs = [each.start_param_sync for each in chunks]
                config.param_sync_func = syncs if len(syncs) > 1 else syncs[0]


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
    """Answer for the other ranks: they say the same.

    But where ranks agree on the optimizer's groups of parameters - pairs of (overrides, of
    experts) - a stage without experts hears of those of the others.
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
    """Convert in place, where torch would exchange the tensors and finds others that know them."""
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
