"""The norm before experts has two names in Megatron's checkpoints; either loads.

With Transformer Engine, and here, it is ``pre_mlp_layernorm``. Megatron's plain torch layers fuse
every norm before an MLP into the name of the MLP's first matrix, as dense layers of Transformer
Engine have it, and forget that experts have no such matrix: ``mlp.linear_fc1.layer_norm_weight``
beside ``mlp.router.weight``. No other layer has that pair, so the second name is recognised from
the files alone. It is read, never written.
"""

import re
from collections.abc import Collection
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from torch import Tensor

from megatron_switch.checkpoint.formats.tensor_source import Region, TensorSource

_NORM = re.compile(r"(.*layers\.(?:\d+\.)?)pre_mlp_layernorm\.(weight|bias)")
"""Of weights and of their moments, whose names end alike; layers may be stacked."""

_ROUTER = re.compile(r"((?:encoder|decoder)\.layers\.\d+\.)mlp\.router\.weight")


def name_norms_as_stored(sharded_state: dict[str, Any], stored_keys: Collection[str]) -> None:
    """Give the norms before experts the keys that a checkpoint has for them.

    Args:
        sharded_state: What is about to be loaded; keys of its tensors are changed in place.
        stored_keys: Keys of the checkpoint.
    """
    for entry in nested_values(sharded_state):
        if isinstance(entry, ShardedBase) and (match := _NORM.fullmatch(entry.key)) is not None:
            other = stored_name(match[1], match[2])
            if entry.key not in stored_keys and other in stored_keys:
                entry.key = other


class NeutralNorms:
    """Another source in which the norms before experts have this program's names."""

    def __init__(self, source: TensorSource) -> None:
        """Wrap ``source``, which has one key for each layer."""
        self._source = source
        self._stored = {}
        for key in source.tensors:
            if (match := _ROUTER.fullmatch(key)) is None:
                continue
            for parameter in ("weight", "bias"):
                other = stored_name(match[1], parameter)
                if other in source.tensors:
                    self._stored[f"{match[1]}pre_mlp_layernorm.{parameter}"] = other
        names = {stored: name for name, stored in self._stored.items()}
        self.tensors = {names.get(key, key): info for key, info in source.tensors.items()}

    def read(self, key: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or a region of it."""
        return self._source.read(self._stored.get(key, key), region)


def stored_name(layer: str, parameter: str) -> str:
    """Return what Megatron's plain torch layers call the norm before experts.

    Args:
        layer: Begin of the key, up to the layer's own parts, such as ``decoder.layers.1.``.
        parameter: ``weight`` or ``bias``.
    """
    return f"{layer}mlp.linear_fc1.layer_norm_{parameter}"
