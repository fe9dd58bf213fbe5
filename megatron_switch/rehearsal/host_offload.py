"""The host's memory in a rehearsal: tensors that Megatron offloads there are counted apart.

Every tensor of a rehearsal is the CPU's, so that Megatron, which looks at ``is_cuda``, would find
everything offloaded already. Inside the functions of Megatron that move tensors, a tensor is on the
device unless it was moved to the host, and a move makes a copy, as with a GPU.

Megatron allows offloaded activations only beside Transformer Engine, whose kernels take no fake
tensors. Which tensors are offloaded, when, and when they come back, is decided in Megatron's own
code around the modules of a layer, which is the same for plain torch modules.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_switch.rehearsal.memory import LiveMemory

_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class HostAndDevice(TorchFunctionMode):
    """Answers, for tensors of one device, as if they were on two.

    Args:
        memory: Knows which storages are the host's, and counts new ones.
    """

    def __init__(self, memory: LiveMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, and distinguish host and device."""
        kwargs = kwargs or {}
        if func == _IS_CUDA:  # ``tensor.is_cuda`` reaches a function mode as this call
            return not self._memory.is_on_host(args[0])
        if func is Tensor.is_pinned:
            return True
        if func is Tensor.cpu and not self._memory.is_on_host(args[0]):
            with self._memory.making("host"):
                return args[0].clone()
        if func is torch.empty and str(kwargs.get("device")) == "cpu" and "pin_memory" in kwargs:
            with self._memory.making("host"):
                return func(*args, **kwargs)
        return func(*args, **kwargs)
