"""Tensors of a model by global name, independent of its layout: to initialise and to compare it.

A distributed checkpoint gives every tensor a global name and shape, and the part of it that a rank
holds. The same description serves to

* initialise a model in any layout with the same numbers (:func:`set_weights`): each whole tensor
  is drawn from a generator that is keyed by its name, then sliced;
* compare weights or gradients with those of another layout (:class:`NamedTensors`), name by name.

Norms start near one and biases near zero; all other weights are normal with deviation
``1 / sqrt(last dim)``, so that activations, router logits and gradients are of order one and no
error of a layout is hidden by zeros.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor, nn

_NOISE = 0.1
"""Deviation of the weights and biases of norms."""


@dataclass(frozen=True)
class Part:
    """What one rank holds of one named tensor."""

    key: str
    """Name of the whole tensor."""
    offset: tuple[int, ...]
    """Where the part begins."""
    shape: tuple[int, ...]
    """Its size along every dim of the whole tensor."""
    whole_shape: tuple[int, ...]
    values: Tensor
    """The part; shape as above, leading dims of size 1 left out."""

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a whole tensor, in the shape of ``values``."""
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            whole = whole.narrow(dim, start, length)
        return whole.reshape(self.values.shape)


def set_weights(chunks: Sequence[nn.Module]) -> None:
    """Initialise every parameter of the model by its name, in place.

    Args:
        chunks: The model chunks of this rank.
    """
    with torch.no_grad():
        for part in NamedTensors(chunks).parts(lambda parameter: parameter.data):
            part.values.copy_(part.of(start_of(part.key, part.whole_shape)))


def start_of(key: str, shape: tuple[int, ...]) -> Tensor:
    """Return the initial values of a whole tensor: float32, on the CPU."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little", signed=True)
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "norm" in key and key.endswith("weight"):
        return 1.0 + _NOISE * normal
    if key.endswith("bias"):
        return _NOISE * normal
    return normal / math.sqrt(shape[-1])


class NamedTensors:
    """The parameters of a model by their global names, replicas included.

    Args:
        chunks: The model chunks of this rank.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._described: list[tuple[nn.Parameter, ShardedTensor | ShardedTensorFactory]] = []
        for chunk in chunks:
            parameters = {id(parameter): parameter for parameter in chunk.parameters()}
            for described in nested_values(chunk.sharded_state_dict()):
                if not isinstance(described, ShardedTensor | ShardedTensorFactory):
                    continue  # objects beside the weights
                assert id(described.data) in parameters, f"{described.key} is no whole parameter"
                self._described.append((parameters.pop(id(described.data)), described))
            assert not parameters, f"{len(parameters)} parameters have no global name"

    def parts(self, values_of: Callable[[nn.Parameter], Tensor]) -> Iterator[Part]:
        """Yield what this rank holds of every named tensor.

        Args:
            values_of: What to describe in the place of a parameter: itself, or its gradient.
        """
        for parameter, described in self._described:
            for tensor in _tensors(described, values_of(parameter)):
                yield _part(tensor)


def _tensors(
    described: ShardedTensor | ShardedTensorFactory, values: Tensor
) -> list[ShardedTensor]:
    """Describe ``values`` as the parameter is described."""
    prefix = "x"  # Megatron's function names optimizer states, and puts one in front
    other = make_sharded_optimizer_tensor(described, values, prefix)
    tensors = other.build() if isinstance(other, ShardedTensorFactory) else [other]
    for tensor in nested_values(tensors):
        tensor.key = tensor.key.removeprefix(f"{prefix}.")
    return list(nested_values(tensors))


def _part(tensor: ShardedTensor) -> Part:
    assert tensor.data is not None
    leading = (1,) * tensor.prepend_axis_num
    return Part(
        key=tensor.key,
        offset=tuple(tensor.global_offset),
        shape=leading + tuple(tensor.data.shape),
        whole_shape=tuple(tensor.global_shape),
        values=tensor.data,
    )
