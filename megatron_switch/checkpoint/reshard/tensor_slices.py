"""Which rank holds which region of a tensor, by its key: the rules of Megatron's layers.

Weights and their optimizer moments are cut alike, so the end of a key decides, whatever comes
before it (``optimizer.state.exp_avg.decoder.layers...``).

    rows (dim 0) over tensor-parallel ranks: embedding, head, qkv and the first matrix of an MLP
    columns (dim 1): the attention's output and the second matrix of an MLP
    experts: the expert dim over expert-parallel ranks, and the same two dims, one further back,
    over expert-tensor ranks
    everything else is whole on every rank, and the first one holds it here

The first matrix of a gated unit is two matrices on top of each other, and each is cut on its own.
Layers go to pipeline stages as :mod:`megatron_switch.checkpoint.reshard.pipeline_placement` says;
the embedding is on the first, what follows the last layer on the last.
"""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_switch.checkpoint.formats.tensor_source import Region
from megatron_switch.layout.grid import Layout

_ROWS = re.compile(
    r"(?:.*\.)?(word_embeddings|output_layer|linear_qkv|linear_q|linear_kv|linear_fc1)\.(weight|bias)"
)
_COLUMNS = re.compile(r"(?:.*\.)?(linear_proj|linear_fc2)\.weight")
_EXPERTS = re.compile(r".*experts\.experts\.(linear_fc1|linear_fc2)\.weight")
_LAYER = re.compile(r"(?:.*\.)?(?:encoder|decoder)\.layers\.(?:(\d+)\.)?.*")
_AFTER_LAYERS = re.compile(r"(?:.*\.)?(decoder\.final_layernorm\.|output_layer\.|lm_head\.).*")


@dataclass(frozen=True)
class TensorSlices:
    """Slices every tensor of a model for a layout."""

    layout: Layout
    stages: tuple[int, ...]
    """Pipeline stage of each layer."""
    gated: bool

    def of(self, key: str, shape: tuple[int, ...]) -> Iterator[tuple[int, Region]]:
        """Yield each region of a tensor with the rank that holds it.

        Args:
            key: Key in a Megatron checkpoint.
            shape: Shape of the whole tensor.
        """
        layers: list[int | None] = [None]
        leading = 0
        match = _LAYER.fullmatch(key)
        if match is not None and match[1] is None:  # dim 0 is the layer: one key for all layers
            layers, leading = list(range(shape[0])), 1
        elif match is not None:
            layers = [int(match[1])]
        for layer in layers:
            for rank, region in self._slices(key, shape[leading:], self._stage(key, layer)):
                if leading:
                    assert layer is not None, "a stack has a layer for each index"
                    region = Region((layer, *region.offsets), (1, *region.sizes))
                yield rank, region

    def _stage(self, key: str, layer: int | None) -> int:
        if self.layout.pp == 1:  # an encoder-decoder's stacks may differ in depth
            return 0
        if layer is not None:
            return self.stages[layer]
        return self.layout.pp - 1 if _AFTER_LAYERS.fullmatch(key) else 0

    def _slices(self, key: str, shape: tuple[int, ...], stage: int) -> Iterator[tuple[int, Region]]:
        layout = self.layout
        if (match := _EXPERTS.fullmatch(key)) is not None:
            dim = 1 if match[1] == "linear_fc1" else 2
            parts = 2 if self.gated and dim == 1 else 1  # gate and up matrix, each cut on its own
            experts, width = shape[0], shape[dim] // (parts * layout.etp)
            for expert, part, etp in itertools.product(
                range(experts), range(parts), range(layout.etp)
            ):
                offsets, sizes = [expert, 0, 0], [1, *shape[1:]]
                offsets[dim], sizes[dim] = (part * layout.etp + etp) * width, width
                ep = expert * layout.ep // experts  # neighbouring experts share a rank
                rank = layout.expert_rank(etp=etp, ep=ep, pp=stage)
                yield rank, Region(tuple(offsets), tuple(sizes))
            return
        rows = _ROWS.fullmatch(key)
        if rows is None and _COLUMNS.fullmatch(key) is None:
            yield layout.dense_rank(tp=0, pp=stage), Region.whole(shape)
            return
        dim = 0 if rows is not None else 1
        parts = 2 if self.gated and rows is not None and rows[1] == "linear_fc1" else 1
        width = shape[dim] // (parts * layout.tp)
        for part, tp in itertools.product(range(parts), range(layout.tp)):
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = (part * layout.tp + tp) * width, width
            yield layout.dense_rank(tp=tp, pp=stage), Region(tuple(offsets), tuple(sizes))
