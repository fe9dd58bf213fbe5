"""The emulated CUDA device: tensors, random streams, streams and events on the CPU.

:class:`CudaOnCpu` is a ``TorchFunctionMode`` that sends everything addressed to a CUDA
device to the CPU. What this emulation promises:

* A tensor asked for on ``"cuda"`` (by name, by index, by ``.cuda()`` or ``.to``) is an
  ordinary CPU tensor; ``Tensor.type()`` answers ``torch.cuda.*`` because Megatron keeps
  its optimizer's parameters apart by that name. ``Tensor.device`` and ``Tensor.is_cuda``
  stay truthful, so that torch's own code takes its CPU paths.
* Streams and events run everything at once, in program order.
* There are two random streams, as on a GPU machine: the CUDA generator's and the host's.

**Random streams.** Operators such as dropout take no generator; they draw from the one
that torch's CPU kernels use. Inside the emulation that one therefore *is* the emulated
CUDA generator, and the host gets a generator of its own (:class:`RandomStreams`). Drawn
from the host's: factories that name no CUDA device (``torch.randperm(5)``), and in-place
draws on a tensor that such a factory made (``torch.empty(()).random_()``, the seed that
every ``DataLoader`` iterator takes; Megatron's weights with ``--use-cpu-initialization``).
The mark of a host tensor is not handed on by operators: what a host tensor is computed
into, or wrapped into as a ``Parameter``, counts as the GPU's.
"""

import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_HOST_MARK = "_megatron_switch_host"
_BYTES_PER_KIB = 1024
_MS_PER_S = 1000.0


def is_cuda(device: object) -> bool:
    """Whether ``device`` (name, index or ``torch.device``) addresses a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int)  # an index alone means the accelerator


class RandomStreams:
    """The emulated CUDA generator and the host's, kept apart.

    Attributes:
        cuda: torch's own CPU generator, from which every kernel draws.
        host: A generator that continues the stream which ``cuda`` had before.
    """

    def __init__(self) -> None:
        """Start both streams from the state of torch's CPU generator."""
        self.cuda: torch.Generator = torch.default_generator
        self.host = torch.Generator()
        self.host.set_state(self.cuda.get_state())

    @contextmanager
    def drawing_from_host(self) -> Iterator[None]:
        """Let kernels draw from the host's stream for the length of a block."""
        cuda_state = self.cuda.get_state()
        self.cuda.set_state(self.host.get_state())
        try:
            yield
        finally:
            self.host.set_state(self.cuda.get_state())
            self.cuda.set_state(cuda_state)

    def leave(self) -> None:
        """Give torch's CPU generator the host's stream back."""
        self.cuda.set_state(self.host.get_state())


class CudaOnCpu(TorchFunctionMode):
    """Sends what is addressed to a CUDA device to the CPU; see the module's text."""

    def __init__(self, streams: RandomStreams) -> None:
        """Draw from ``streams``."""
        super().__init__()
        self._streams = streams

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` with CUDA devices replaced, from the right random stream."""
        kwargs = kwargs or {}
        on_cuda = "device" in kwargs and is_cuda(kwargs["device"])
        if on_cuda:
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(func, args, kwargs)
        if func in _FACTORIES:
            return func(*args, **kwargs) if on_cuda else _marked(func(*args, **kwargs))
        if func in _RANDOM_FACTORIES:
            with self._stream(not on_cuda, kwargs):
                made = func(*args, **kwargs)
            return made if on_cuda else _marked(made)
        if func in _IN_PLACE_DRAWS:
            subject = args[0] if args else kwargs["tensor"]
            with self._stream(hasattr(subject, _HOST_MARK), kwargs):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _stream(self, from_host: bool, kwargs: dict[str, Any]) -> Any:
        if from_host and kwargs.get("generator") is None:
            return self._streams.drawing_from_host()
        return nullcontext()


def _marked(made: Any) -> Any:
    setattr(made, _HOST_MARK, True)
    return made


def _answer_cuda(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``.cuda()`` and ``.pin_memory()``: the tensor is there already, and is the GPU's now."""
    return _unmarked(args[0])


def _answer_to(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``.to(device, ...)`` with the device given by position."""
    if len(args) > 1 and is_cuda(args[1]):
        return _unmarked(func(args[0], _CPU, *args[2:], **kwargs))
    return func(*args, **kwargs)


def _answer_type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``.type()`` names the CUDA type; ``.type(dtype)`` converts."""
    if len(args) == 1 and not kwargs:
        return func(*args).replace("torch.", "torch.cuda.", 1)
    return func(*args, **kwargs)


def _unmarked(tensor: Any) -> Any:
    if hasattr(tensor, _HOST_MARK):
        delattr(tensor, _HOST_MARK)
    return tensor


_ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.cuda: _answer_cuda,
    Tensor.pin_memory: _answer_cuda,
    Tensor.to: _answer_to,
    Tensor.type: _answer_type,
}
_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor})
_RANDOM_FACTORIES = frozenset({torch.rand, torch.randn, torch.randint, torch.randperm})
_IN_PLACE_DRAWS = frozenset(
    {
        *(
            getattr(Tensor, name)
            for name in ["random_", "uniform_", "normal_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"]
        ),
        *(
            getattr(torch.nn.init, name)
            for name in ["uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_"]
        ),
    }
)


class Stream:
    """A CUDA stream whose work is done by the time it is issued."""

    cuda_stream = 0
    priority = 0

    def __init__(self, device: object = None, priority: int = 0, **kwargs: object) -> None:
        """Accept what ``torch.cuda.Stream`` accepts."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest priority."""
        return (0, 0)

    def wait_stream(self, stream: object) -> None:
        """Return: the other stream has nothing left to do."""

    def wait_event(self, event: object) -> None:
        """Return: the event has happened."""

    def synchronize(self) -> None:
        """Return: nothing is left to do."""

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record ``event``, or a new one, now."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        """Make this the current stream, which changes nothing."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the stream."""


class Event:
    """A CUDA event; times are the host's wall clock."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        """Accept what ``torch.cuda.Event`` accepts."""
        self._recorded_s = time.perf_counter()

    def record(self, stream: object = None) -> None:
        """Take the time."""
        self._recorded_s = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Return: the event has happened."""

    def synchronize(self) -> None:
        """Return: the event has happened."""

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._recorded_s - self._recorded_s) * _MS_PER_S


@dataclass(frozen=True)
class DeviceProperties:
    """What ``torch.cuda.get_device_properties`` answers; bytes and counts are the host's."""

    name: str = "CPU in place of a CUDA device"
    major: int = 8  # the first generation with bfloat16
    minor: int = 0
    total_memory: int = 0
    multi_processor_count: int = 1
    warp_size: int = 32


class Device:
    """The answers to ``torch.cuda``'s questions about devices, streams and memory."""

    def __init__(self) -> None:
        """One device for each rank of this host."""
        self._current = 0
        self._stream = Stream()

    def current_device(self) -> int:
        """Index of the current device."""
        return self._current

    def set_device(self, device: int | str | torch.device) -> None:
        """Make ``device`` the current one."""
        index = device if isinstance(device, int) else torch.device(device).index
        self._current = self._current if index is None else index

    def exchange_device(self, device: int) -> int:
        """Make ``device`` the current one and return the last; negative changes nothing."""
        last = self._current
        self._current = device if device >= 0 else last
        return last

    def device_count(self) -> int:
        """One device for each rank of this host, so that every rank finds its own."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def is_available(self) -> bool:
        """No: torch's own code must take its CPU paths, because the tensors are on the CPU."""
        return False

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        """Compute capability."""
        return (DeviceProperties.major, DeviceProperties.minor)

    def get_device_name(self, device: object = None) -> str:
        """Name for logs."""
        return DeviceProperties.name

    def get_device_properties(self, device: object = None) -> DeviceProperties:
        """Memory in bytes and cores of the host."""
        return DeviceProperties(
            total_memory=psutil.virtual_memory().total,
            multi_processor_count=os.cpu_count() or 1,
        )

    def current_stream(self, device: object = None) -> Stream:
        """The only stream."""
        return self._stream

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        """Enter a stream, which changes nothing."""
        yield

    def ignore(self, *args: object, **kwargs: object) -> None:
        """Return: there is nothing to wait for, to free or to mark."""

    def is_current_stream_capturing(self) -> bool:
        """No CUDA graph is ever captured."""
        return False

    def lazy_call(self, callable: Callable[[], None], **kwargs: object) -> None:
        """Call now: the device needs no initialisation."""
        callable()

    def memory_allocated(self, device: object = None) -> int:
        """Resident memory of this process, in bytes."""
        return int(psutil.Process().memory_info().rss)

    def max_memory_allocated(self, device: object = None) -> int:
        """Highest resident memory of this process so far, in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_KIB

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Bytes that are free and bytes in all."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """Current and peak bytes; every other figure of torch's allocator is 0."""
        figures = defaultdict[str, int](int)
        for kind in ("allocated", "reserved", "active"):
            figures[f"{kind}_bytes.all.current"] = self.memory_allocated()
            figures[f"{kind}_bytes.all.peak"] = self.max_memory_allocated()
        return figures
