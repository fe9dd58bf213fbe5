"""Function mode that redirects CUDA tensors to the CPU, with the random streams of a GPU machine.

**Devices.** A tensor requested on ``"cuda"`` (by name, by index, by ``.cuda()`` or ``.to``) is an
ordinary CPU tensor. ``Tensor.type()`` returns ``torch.cuda.*``, because Megatron groups its
optimizer's parameters by that name. ``Tensor.device`` and ``Tensor.is_cuda`` are the CPU's, so that
torch's own code takes its CPU paths.

**Random streams.** A GPU machine has two: the CUDA generator's and the host's. Operators
such as dropout take no generator; they draw from the one that torch's CPU kernels use.
Inside the emulation that one therefore *is* the emulated CUDA generator, and the host gets
a generator of its own (:class:`RandomStreams`). Drawn from the host's are factories that
name no CUDA device (``torch.randperm(5)``), and in-place draws on a tensor that such a
factory made (``torch.empty(()).random_()``, the seed that every ``DataLoader`` iterator
takes; a weight that is initialised on the CPU). Operators do not pass this mark on: what
is computed from a host tensor, or wrapped around it as a ``Parameter``, counts as the GPU's.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_switch.upstream.private import function_mode_stack

_Func = Callable[..., Any]
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]

_CPU = torch.device("cpu")


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
        """Restore the host's stream in torch's CPU generator."""
        self.cuda.set_state(self.host.get_state())


class CudaOnCpu(TorchFunctionMode):
    """Handles calls that name a CUDA device or draw random numbers; see the module's docstring."""

    def __init__(self, streams: RandomStreams) -> None:
        """Draw from ``streams``."""
        super().__init__()
        self._streams = streams
        self._host_tensors = WeakTensorKeyDictionary()

    def is_active(self) -> bool:
        """Whether this mode sees calls made now; it does not inside a call that it handles."""
        return self in function_mode_stack()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` on the CPU."""
        handler = _HANDLERS.get(func)
        if not kwargs:  # the common case of thousands of calls a step
            return func(*args) if handler is None else handler(self, func, args, {}, False)
        on_cuda = "device" in kwargs and is_cuda(kwargs["device"])
        if on_cuda:
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if handler is None:
            return func(*args, **kwargs)
        return handler(self, func, args, kwargs, on_cuda)

    # The handlers below share one signature; ``on_cuda``: a keyword named a CUDA device.

    def _make(self, func: _Func, args: _Args, kwargs: _Kwargs, on_cuda: bool) -> Any:
        made = func(*args, **kwargs)
        if not on_cuda:
            self._host_tensors[made] = True
        return made

    def _make_random(self, func: _Func, args: _Args, kwargs: _Kwargs, on_cuda: bool) -> Any:
        with self._stream(not on_cuda, kwargs):
            return self._make(func, args, kwargs, on_cuda)

    def _draw(self, func: _Func, args: _Args, kwargs: _Kwargs, on_cuda: bool) -> Any:
        subject = args[0] if args else kwargs["tensor"]
        with self._stream(subject in self._host_tensors, kwargs):
            return func(*args, **kwargs)

    def _to(self, func: _Func, args: _Args, kwargs: _Kwargs, on_cuda: bool) -> Any:
        if len(args) > 1 and is_cuda(args[1]):
            args, on_cuda = (args[0], _CPU, *args[2:]), True
        moved = func(*args, **kwargs)
        return self._moved_to_gpu(moved) if on_cuda else moved

    def _cuda(self, func: _Func, args: _Args, kwargs: _Kwargs, on_cuda: bool) -> Any:
        return self._moved_to_gpu(args[0])

    def _pin_memory(self, func: _Func, args: _Args, kwargs: _Kwargs, on_cuda: bool) -> Any:
        return args[0]

    def _type(self, func: _Func, args: _Args, kwargs: _Kwargs, on_cuda: bool) -> Any:
        if len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)

    def _moved_to_gpu(self, tensor: Tensor) -> Tensor:
        if tensor in self._host_tensors:
            del self._host_tensors[tensor]
        return tensor

    def _stream(self, from_host: bool, kwargs: _Kwargs) -> AbstractContextManager[None]:
        if from_host and kwargs.get("generator") is None:
            return self._streams.drawing_from_host()
        return nullcontext()


_IN_PLACE = "random_ uniform_ normal_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_"
_INITIALISERS = (
    "uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ "
    "kaiming_normal_ orthogonal_ sparse_"
)
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.tensor)
_RANDOM_FACTORIES = (torch.rand, torch.randn, torch.randint, torch.randperm)

_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_FACTORIES, CudaOnCpu._make),
    **dict.fromkeys(_RANDOM_FACTORIES, CudaOnCpu._make_random),
    **{getattr(Tensor, name): CudaOnCpu._draw for name in _IN_PLACE.split()},
    **{getattr(torch.nn.init, name): CudaOnCpu._draw for name in _INITIALISERS.split()},
    Tensor.to: CudaOnCpu._to,
    Tensor.cuda: CudaOnCpu._cuda,
    Tensor.pin_memory: CudaOnCpu._pin_memory,
    Tensor.type: CudaOnCpu._type,
}
