"""Expert weights in Megatron's distributed checkpoints.

Keys and global shapes are those that Megatron's own experts write, whichever of its classes wrote
them: ``experts.linear_fc1.weight`` [E, F, D] and ``experts.linear_fc2.weight`` [E, D, F], with a
layer dim in front where layers are stacked, and one empty ``_extra_state`` object for every expert
and matrix, because a checkpoint without them does not load. So checkpoints can be exchanged in both
directions, and between layouts.

In the model the experts of a rank are one parameter; in the checkpoint each is a tensor. A
``ShardedTensorFactory`` turns one into the other, and Megatron's optimizers apply it to moments and
master weights too.

Shape letters:

    E, e  experts, local experts    F  expert hidden width    D  model
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedObject, ShardedTensorFactory
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

Offset = tuple[int, int, int]
"""(dim, index of the part, number of parts)."""

_LINEARS = ("linear_fc1", "linear_fc2")


@dataclass(frozen=True)
class ExpertShards:
    """Which part of a layer's experts a rank holds, and how a checkpoint names it."""

    first_expert: int
    num_local_experts: int
    num_experts: int
    tensor_rank: int
    tensor_size: int
    data_rank: int
    """Rank among those that hold the same weights; one of them writes."""
    gated: bool
    """Whether fc1 holds two matrices on top of each other; each is sharded on its own."""
    layer_offsets: tuple[Offset, ...]
    """Dims in front of the expert's, from Megatron (stacked layers)."""
    separate_keys: bool
    """Whether each expert gets a key of its own (Megatron's ``singleton_local_shards``)."""

    def state_dict(self, prefix: str, weight1: Tensor, weight2: Tensor) -> dict[str, Any]:
        """Return the sharded state of the experts module.

        Args:
            prefix: Name of the module in the model, with a dot at its end.
            weight1: The parameter of shape (e, F, D), this rank's shard.
            weight2: The parameter of shape (e, D, F), this rank's shard.
        """
        weights = zip(("weight1", "weight2"), _LINEARS, (weight1, weight2), strict=True)
        state: dict[str, Any] = {
            f"{prefix}{name}": self._factory(f"{prefix}experts.{linear}.weight", weight, linear)
            for name, linear, weight in weights
        }
        state[f"{prefix}_extra_state"] = {
            f"{linear}.{index}": self._extra_state(f"{prefix}experts.{linear}._extra_state", index)
            for linear in _LINEARS
            for index in range(self.num_local_experts)
        }
        return state

    def _factory(self, key: str, weight: Tensor, linear: str) -> ShardedTensorFactory:
        """Describe a parameter whose experts become tensors when it is saved."""

        @torch.no_grad()
        def build(
            key: str, data: Tensor, replica_id: ReplicaId, flattened_range: slice | None
        ) -> list[ShardedTensor]:
            assert flattened_range is None, "an optimizer format that 0.19.2 no longer writes"
            return list(self._tensors(key, data, replica_id, linear))

        @torch.no_grad()
        def merge(tensors: list[Tensor]) -> Tensor:
            return torch.cat(tensors).view(weight.shape)

        return ShardedTensorFactory(key, weight, build, merge, (0, 0, self.data_rank))

    def _tensors(
        self, key: str, data_eXY: Tensor, replica_id: ReplicaId, linear: str
    ) -> Iterator[ShardedTensor]:
        """Yield what :meth:`_factory` merges by concatenation, in order."""
        sharded_dim = _LINEARS.index(linear)
        parts = 2 if self.gated and linear == "linear_fc1" else 1
        for index, weight_XY in enumerate(data_eXY):
            leading = self._leading_offsets(index)
            for part, piece in enumerate(torch.chunk(weight_XY, parts)):
                suffix = ("_w", "_v")[part] if self.separate_keys and parts == 2 else ""
                # Gated halves share one global tensor unless each has a key: all shards of the
                # first half come before those of the second.
                stacked = 1 if self.separate_keys else parts
                place = (part * self.tensor_size if stacked == 2 else 0) + self.tensor_rank
                yield ShardedTensor.from_rank_offsets(
                    self._key_of(key, index) + suffix,
                    piece,
                    *leading,
                    (len(leading) + sharded_dim, place, self.tensor_size * stacked),
                    replica_id=replica_id,
                    prepend_axis_num=len(leading),
                )

    def _extra_state(self, key: str, index: int) -> ShardedObject:
        return make_sharded_object_for_checkpoint(
            None,
            self._key_of(key, index),
            self._leading_offsets(index),
            replica_id=(0, self.tensor_rank, self.data_rank),
        )

    def _leading_offsets(self, index: int) -> tuple[Offset, ...]:
        if self.separate_keys:
            return self.layer_offsets
        expert = (len(self.layer_offsets), self.first_expert + index, self.num_experts)
        return (*self.layer_offsets, expert)

    def _key_of(self, key: str, index: int) -> str:
        """Put the expert's index into a key, where each expert has its own."""
        if not self.separate_keys:
            return key
        module, name = key.rsplit("experts.", 1)
        return f"{module}experts.{self.first_expert + index}.{name}"
