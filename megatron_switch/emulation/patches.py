"""Every patch that CPU emulation applies, and the block that applies them.

:func:`cuda_on_cpu` is the only entry: unmodified ``megatron.training.pretrain`` trains over gloo
inside it, and everything is restored when it is left, also by an exception.

torch's functions are replaced entirely; Megatron's are few, because Megatron calls torch.
``torch.cuda.is_available()`` returns False, so that torch (data loader, checkpoints, autocast)
takes the paths that fit CPU tensors; Megatron's assertion that it is True is avoided through
Megatron's own ``allow_no_cuda`` argument.

TorchDynamo is off inside the block: what Megatron compiles would need a C++ compiler and 17 s at a
cold start.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from megatron_switch.emulation.device import EmulatedDevice, Event, Stream
from megatron_switch.emulation.function_mode import CudaOnCpu, RandomStreams
from megatron_switch.emulation.gloo import (
    GroupsOnOneDevice,
    gathering_unequal_sizes,
    scattering_unequal_sizes,
    with_sizes_as_lists,
)
from megatron_switch.upstream.patching import Patch, applied

_NO_GPU = "there is no CUDA device"
_BOUND_AT_IMPORT = "it holds torch's own function from before the emulation"
_HOST_STREAM = "the host has a generator of its own"
_RECOMPUTE = "recompute must restore the emulated CUDA stream, though its tensors are the CPU's"
_entered: list[CudaOnCpu] = []


def import_patches() -> tuple[Patch, ...]:
    """Patches for the time in which a process that will only ever emulate imports Megatron."""
    return (
        Patch(
            "torch:compile",
            "Megatron compiles functions as it is imported, which takes Inductor 2 s to get ready "
            "for, and nothing compiled is run here",
            _not_compiled,
        ),
    )


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Emulate CUDA on the CPU for the length of a ``with`` block.

    Start process groups with gloo (Megatron: ``--distributed-backend gloo``). The block
    belongs to one process: fork first, then enter it on every rank.

    Raises:
        UpstreamError: The installed torch or Megatron-Core is not what the patches were
            checked against; nothing has been changed.
    """
    assert not _entered, "cuda_on_cpu() is already entered in this process"
    streams = RandomStreams()
    mode = CudaOnCpu(streams)
    with ExitStack() as stack:
        stack.enter_context(applied(emulation_patches(EmulatedDevice(), streams, mode)))
        stack.callback(streams.leave)
        # Megatron asks for one connection, so that its overlapped transfers start in order.
        stack.enter_context(_environment_default("CUDA_DEVICE_MAX_CONNECTIONS", "1"))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        _entered.append(mode)
        stack.callback(_entered.clear)
        stack.enter_context(mode)
        yield


def emulation_patches(
    device: EmulatedDevice, streams: RandomStreams, mode: CudaOnCpu
) -> tuple[Patch, ...]:
    """Return every patch, without applying it."""
    replacements = _replacements(device) | {
        "torch.cuda:default_generators": (streams.cuda,) * device.device_count()
    }
    return (
        *(Patch(target, _NO_GPU, value) for target, value in replacements.items()),
        *(
            Patch(alias, _BOUND_AT_IMPORT, replacements[origin], alias_of=origin)
            for alias, origin in _ALIASES.items()
        ),
        Patch("torch:default_generator", _HOST_STREAM, streams.host),
        Patch("torch.random:default_generator", _HOST_STREAM, streams.host),
        Patch(
            "torch:Tensor.record_stream",
            "it takes only streams of a real device",
            lambda self, stream: None,
        ),
        Patch("torch.utils.checkpoint:_infer_device_type", _RECOMPUTE, lambda *args: "cuda"),
        Patch(
            "torch.utils.checkpoint:get_device_states",
            _RECOMPUTE,
            lambda *args: ([device.current_device()], [streams.cuda.get_state()]),
        ),
        Patch(
            "torch.autograd:_engine_run_backward",
            "backward suspends function modes, so recompute would ask for a real device",
            wrapper=functools.partial(_entering_again, mode),
        ),
        Patch(
            "torch.distributed.distributed_c10d:ProcessGroupGloo",
            "every group would have a thread of its own that wakes a hundred times a second",
            wrapper=GroupsOnOneDevice,
        ),
        Patch(
            "torch.distributed:all_to_all_single",
            "gloo takes split sizes as lists only",
            wrapper=with_sizes_as_lists,
        ),
        Patch(
            "torch.distributed:all_gather",
            "gloo refuses unequal sizes",
            wrapper=gathering_unequal_sizes,
        ),
        Patch(
            "torch.distributed:reduce_scatter",
            "gloo refuses unequal sizes",
            wrapper=scattering_unequal_sizes,
        ),
        Patch(
            "megatron.training.training:initialize_megatron",
            "pretrain() has no argument that it would pass on as allow_no_cuda",
            wrapper=lambda original: functools.partial(original, allow_no_cuda=True),
            sha256=("d9b467adcaed1325932422670da7ee3b374bcd0f07f2f329780b54d41ca829c7",),
        ),
        Patch(
            "megatron.training.training:set_jit_fusion_options",
            "its warm-up compiles with a C++ compiler",
            device.ignore,
            sha256=("fe3ec3dcf2af9e1b941620974e849ce16a2fe18113f04429d90e86da582478ca",),
        ),
    )


_ALIASES = {
    "torch.cuda.random:current_device": "torch.cuda:current_device",
    "torch.cuda.random:device_count": "torch.cuda:device_count",
}
"""Names bound at import, by the name of their origin."""


def _replacements(device: EmulatedDevice) -> dict[str, Any]:
    """Return the replacement of each name of ``torch.cuda`` that Megatron uses."""
    return {
        "torch.accelerator:is_available": device.is_available,
        # With this one, torch's deferred calls run at once, wherever their names were copied at
        # import (megatron.core.tensor_parallel.random sets random states with them).
        "torch.cuda:_initialized": True,
        "torch.cuda:_is_in_bad_fork": device.is_in_bad_fork,
        "torch.cuda:_exchange_device": device.exchange_device,
        "torch.cuda:_maybe_exchange_device": device.exchange_device,
        "torch.cuda:is_available": device.is_available,
        "torch.cuda:device_count": device.device_count,
        "torch.cuda:current_device": device.current_device,
        "torch.cuda:set_device": device.set_device,
        "torch.cuda:get_device_name": device.get_device_name,
        "torch.cuda:get_device_capability": device.get_device_capability,
        "torch.cuda:get_device_properties": device.get_device_properties,
        "torch.cuda:synchronize": device.ignore,
        "torch.cuda:Stream": Stream,
        "torch.cuda:Event": Event,
        "torch.cuda:stream": device.stream,
        "torch.cuda:set_stream": device.ignore,
        "torch.cuda:current_stream": device.current_stream,
        "torch.cuda:default_stream": device.current_stream,
        "torch.cuda:is_current_stream_capturing": device.is_current_stream_capturing,
        "torch.cuda:empty_cache": device.ignore,
        "torch.cuda:memory_allocated": device.memory_allocated,
        "torch.cuda:memory_reserved": device.memory_allocated,
        "torch.cuda:max_memory_allocated": device.max_memory_allocated,
        "torch.cuda:max_memory_reserved": device.max_memory_allocated,
        "torch.cuda:reset_peak_memory_stats": device.ignore,
        "torch.cuda:memory_stats": device.memory_stats,
        "torch.cuda:mem_get_info": device.mem_get_info,
        "torch.cuda.nvtx:range_push": device.ignore,
        "torch.cuda.nvtx:range_pop": device.ignore,
        "torch.cuda:FloatTensor": torch.FloatTensor,
        "torch.cuda:DoubleTensor": torch.DoubleTensor,
        "torch.cuda:IntTensor": torch.IntTensor,
        "torch.cuda:LongTensor": torch.LongTensor,
    }


def _not_compiled(model: Any = None, **settings: Any) -> Any:
    """Replace ``torch.compile``: called, or as a decorator with or without settings."""
    return (lambda function: function) if model is None else model


def _entering_again(mode: CudaOnCpu, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the autograd engine: enter ``mode``, which the call of backward has suspended."""

    def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if mode.is_active() else mode:
            return original(*args, **kwargs)

    return engine_run_backward


@contextmanager
def _environment_default(name: str, value: str) -> Iterator[None]:
    """Set a variable that is not set, for the length of a ``with`` block."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
