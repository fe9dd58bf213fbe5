"""The host's memory in a rehearsal: what Megatron offloads there, counted apart.

Every tensor of a rehearsal is the CPU's, so that Megatron, which looks at ``is_cuda``, would find
everything offloaded already. In the functions of Megatron that move tensors, a tensor is on the
device unless it was moved to the host, and moving makes a copy, as with a GPU.

Megatron lets activations be offloaded only beside Transformer Engine, whose kernels take no
tensors without values. Which tensors are offloaded, when, and when they come back, is decided in
Megatron's own code around the modules of a layer, which is the same for plain torch modules.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_switch.rehearsal.memory import LiveMemory
from megatron_switch.upstream.patching import Patch, applied

_ONE_DEVICE = "it looks for CUDA tensors, and a rehearsed tensor is the CPU's"
_OPTIMIZER = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer."
_ACTIVATIONS = "megatron.core.pipeline_parallel.fine_grained_activation_offload:"


@contextmanager
def host_memory(memory: LiveMemory) -> Iterator[None]:
    """Let Megatron offload to a host whose memory is counted apart, for the length of a block.

    Args:
        memory: What counts.

    Raises:
        UpstreamError: The installed Megatron-Core is not what the patches were checked against.
    """
    with applied(offload_patches(memory)):
        yield


def offload_patches(memory: LiveMemory) -> tuple[Patch, ...]:
    """Return the patches of :func:`host_memory`, without applying them."""

    def moving(original: Callable[..., Any]) -> Callable[..., Any]:
        def with_two_devices(*args: Any, **kwargs: Any) -> Any:
            with _TwoDevices(memory):
                return original(*args, **kwargs)

        return with_two_devices

    def can_be_moved(tensor: Any) -> bool:
        return not isinstance(tensor, nn.Parameter) and not memory.is_on_host(tensor)

    def releasing(original: Callable[..., Any]) -> Callable[..., Any]:
        def bulk_offload(self: Any, name: str, forced_released_tensors: list[Tensor]) -> None:
            with _TwoDevices(memory):
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
            "it gives memory of tensors back, which is to be counted",
            wrapper=releasing,
            sha256=("b661c749e88bd20b1d969c1e2615b65390171d9f0c9c5f8c8ab901770f88b46a",),
        ),
        *(
            Patch(
                f"{_ACTIVATIONS}PipelineOffloadManager.{name}",
                "it tells Transformer Engine, which is not rehearsed, to offload as well",
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


_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class _TwoDevices(TorchFunctionMode):
    """Answers, for tensors of one device, as if they were on two."""

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
        """Run ``func``, but tell host and device apart."""
        kwargs = kwargs or {}
        if func == _IS_CUDA:
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
