"""The emulated CUDA device: functions of ``torch.cuda`` with the CPU's values.

Streams and events complete at once, in program order; an event's time is the host's clock. Memory
is that of this process, cores and total memory are the host's. What is not here (CUDA graphs,
memory pools, profilers) is not emulated and fails as it does without a GPU.
"""

import os
import resource
import time
from collections import defaultdict
from dataclasses import dataclass

import psutil
import torch

_BYTES_PER_KIB = 1024
_MS_PER_S = 1000.0


class Stream:
    """A CUDA stream whose work is complete as soon as it is issued."""

    cuda_stream = 0
    priority = 0

    def __init__(self, device: object = None, priority: int = 0, **kwargs: object) -> None:
        """Accept what ``torch.cuda.Stream`` accepts."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Least and greatest priority."""
        return (0, 0)

    def wait_stream(self, stream: object) -> None:
        """Do nothing: the work of the other stream is complete."""

    def wait_event(self, event: object) -> None:
        """Do nothing: the event has happened."""

    def synchronize(self) -> None:
        """Do nothing: all work is complete."""

    def query(self) -> bool:
        """Whether all work is complete."""
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
        """Record the time."""
        self._recorded_s = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Do nothing: the event has happened."""

    def synchronize(self) -> None:
        """Do nothing: the event has happened."""

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to ``end_event``."""
        return (end_event._recorded_s - self._recorded_s) * _MS_PER_S


@dataclass(frozen=True)
class DeviceProperties:
    """Result of ``torch.cuda.get_device_properties``; bytes and counts are the host's."""

    name: str = "CPU in place of a CUDA device"
    major: int = 8  # the first generation with bfloat16
    minor: int = 0
    total_memory: int = 0
    multi_processor_count: int = 1
    warp_size: int = 32


class StreamContext:
    """What ``torch.cuda.stream`` returns: it may be entered again, also inside itself."""

    def __init__(self, device: "EmulatedDevice", stream: Stream | None) -> None:
        self._device, self._stream = device, stream
        self._outer: list[Stream] = []

    def __enter__(self) -> None:
        """Make the stream the current one."""
        self._outer.append(self._device.exchange_stream(self._stream))

    def __exit__(self, *exception: object) -> None:
        """Return to the stream before it."""
        self._device.exchange_stream(self._outer.pop())


class EmulatedDevice:
    """Replacements of ``torch.cuda``'s functions for devices, streams and memory."""

    def __init__(self) -> None:
        """Start on device 0."""
        self._current = 0
        self._stream = Stream()

    def current_device(self) -> int:
        """Index of the current device."""
        return self._current

    def set_device(self, device: int | str | torch.device) -> None:
        """Make ``device`` the current one."""
        index = device if isinstance(device, int) else torch.device(device).index
        self._current = self._current if index is None else index

    def exchange_device(self, device: int | None) -> int:
        """Make ``device`` the current one and return the last; None or -1 changes nothing."""
        last = self._current
        if device is not None and device >= 0:
            self._current = device
        return last

    def device_count(self) -> int:
        """One device for each rank of this host, so that every rank finds its own."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def is_available(self) -> bool:
        """False: torch's own code must take its CPU paths, because the tensors are on the CPU."""
        return False

    def is_in_bad_fork(self) -> bool:
        """False: a forked process can use the emulated device, whatever its parent used."""
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
            total_memory=psutil.virtual_memory().total, multi_processor_count=os.cpu_count() or 1
        )

    def current_stream(self, device: object = None) -> Stream:
        """The stream that was entered last."""
        return self._stream

    def stream(self, stream: Stream | None) -> "StreamContext":
        """Return a context in which a stream is the current one; None changes nothing."""
        return StreamContext(self, stream)

    def exchange_stream(self, stream: Stream | None) -> Stream:
        """Make a stream the current one, unless it is None, and return the last."""
        last = self._stream
        self._stream = last if stream is None else stream
        return last

    def ignore(self, *args: object, **kwargs: object) -> None:
        """Do nothing: there is nothing to wait for, to free or to mark."""

    def is_current_stream_capturing(self) -> bool:
        """False: no CUDA graph is ever captured."""
        return False

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
