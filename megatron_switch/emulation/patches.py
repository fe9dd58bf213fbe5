"""Every patch that CPU emulation applies, and the block that applies them.

:func:`cuda_on_cpu` is the only door: unmodified ``megatron.training.pretrain`` trains
over gloo inside it, and everything is as before when it is left, also by an exception.

The patches fall in two parts. torch's names are answered entirely by
:mod:`megatron_switch.emulation.device`; Megatron's are few, because it asks torch.
``torch.cuda.is_available()`` answers no, so that torch (data loader, checkpoints,
autocast) takes the paths that fit CPU tensors; Megatron's assertion that it is true is
answered through its own ``allow_no_cuda`` argument.

Inside the block TorchDynamo is off (:func:`torch.compiler.set_stance`): Megatron's
compiled functions would need a C++ compiler and 17 s of a cold start.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_switch.emulation.collectives import (
    gathering_unequal_sizes,
    scattering_unequal_sizes,
    with_sizes_as_lists,
)
from megatron_switch.emulation.device import CudaOnCpu, Device, Event, RandomStreams, Stream
from megatron_switch.patching import Patch, applied

_MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_entered: list[CudaOnCpu] = []


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Answer CUDA calls on the CPU for the length of a ``with`` block.

    Start the process group with gloo (Megatron: ``--distributed-backend gloo``). The
    block belongs to one process: fork first, then enter it on every rank.

    Raises:
        UpstreamError: The installed torch or Megatron-Core is not what the patches were
            checked against; nothing has been changed.
    """
    assert not _entered, "cuda_on_cpu() is already entered in this process"
    streams = RandomStreams()
    mode = CudaOnCpu(streams)
    patches = (*torch_patches(Device(), streams, mode), *megatron_patches())
    with ExitStack() as stack:
        stack.enter_context(applied(patches))
        stack.callback(streams.leave)
        stack.enter_context(_environment(_MAX_CONNECTIONS, "1"))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        _entered.append(mode)
        stack.callback(_entered.clear)
        with mode:
            yield


def torch_patches(device: Device, streams: RandomStreams, mode: CudaOnCpu) -> tuple[Patch, ...]:
    """Names of torch that :class:`Device` answers."""
    no_gpu = "there is no CUDA device to ask"
    host = "the host draws from a generator of its own"
    generators = (streams.cuda,) * device.device_count()
    answers: dict[str, Any] = {
        "torch.cuda:_lazy_init": device.ignore,
        "torch.cuda:_lazy_call": device.lazy_call,
        "torch.cuda:_is_in_bad_fork": device.is_available,
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
        "torch.accelerator:is_available": device.is_available,
        "torch.cuda:default_generators": generators,
    }
    # torch.cuda.random bound these at import.
    bound = {
        f"torch.cuda.random:{name}": f"torch.cuda:{name}"
        for name in ("_lazy_init", "_lazy_call", "current_device", "device_count")
    }
    return (
        *(Patch(target, no_gpu, answer) for target, answer in answers.items()),
        *(
            Patch(target, no_gpu, answers[origin], alias_of=origin)
            for target, origin in bound.items()
        ),
        Patch("torch:default_generator", host, streams.host),
        Patch("torch.random:default_generator", host, streams.host),
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
            "torch.autograd:_engine_run_backward",
            "backward suspends function modes, so recompute would ask for a real device",
            wrapper=functools.partial(_with_mode, mode),
        ),
    )


def megatron_patches() -> tuple[Patch, ...]:
    """Names of Megatron-Core 0.19.2 that have no seam."""
    bound_at_import = "it holds torch's own function from before the emulation"
    device = Device()
    return (
        Patch(
            "megatron.core.tensor_parallel.random:_lazy_init",
            bound_at_import,
            device.ignore,
            alias_of="torch.cuda:_lazy_init",
        ),
        Patch(
            "megatron.core.tensor_parallel.random:_lazy_call",
            bound_at_import,
            device.lazy_call,
            alias_of="torch.cuda:_lazy_call",
        ),
        Patch(
            "megatron.training.training:initialize_megatron",
            "pretrain() offers no way to pass allow_no_cuda",
            wrapper=lambda original: functools.partial(original, allow_no_cuda=True),
            sha256=("d9b467adcaed1325932422670da7ee3b374bcd0f07f2f329780b54d41ca829c7",),
        ),
        Patch(
            "megatron.training.training:set_jit_fusion_options",
            "its warm-up compiles with a C++ compiler and draws random numbers",
            device.ignore,
            sha256=("fe3ec3dcf2af9e1b941620974e849ce16a2fe18113f04429d90e86da582478ca",),
        ),
    )


def _with_mode(mode: CudaOnCpu, original: Callable[..., Any]) -> Callable[..., Any]:
    def engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        if mode in torch.overrides._get_current_function_mode_stack():
            return original(*args, **kwargs)
        with mode:
            return original(*args, **kwargs)

    return engine_run_backward


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
