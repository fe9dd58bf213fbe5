"""Turn a dense model into a Switch model: every expert begins as the MLP that it replaces.

Everything but the chosen MLPs is copied; routers are new. With plain copies (scale ``none``) the
first output of a sparse layer is the dense one times the gate, which is about 1/E where the router
knows nothing yet: the loss starts higher and falls within some hundred steps, as the network adapts
to it. Scale ``sqrt_e`` undoes the gate at the start: with a router that is uniform
and experts that drop nothing, the first output *is* the dense one.

How ``sqrt_e`` does it depends on the unit, because a factor passes unchanged only through what is
linear. Each of two factors is sqrt(E):

    relu           first and second matrix (relu(s x) = s relu(x))
    gated          the half that is not passed through the nonlinearity, and the second matrix
    all others     the second matrix, twice: E

A dense model is taken as chunks of a Megatron checkpoint that may not exist yet, so that one in
Hugging Face's format needs no checkpoint in between.

Source:
    Komatsuzaki et al., *Sparse Upcycling*, arXiv:2212.05055; the scale, in another form, He et al.,
    *Upcycling Large Language Models into Mixture of Experts*, arXiv:2410.07524.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from megatron_switch.architecture.model import Architecture
from megatron_switch.checkpoint.formats.dist_writer import TensorChunk
from megatron_switch.checkpoint.formats.tensor_source import Region
from megatron_switch.errors import CheckpointError
from megatron_switch.moe.initialization import init_router_weight_

Scale = Literal["none", "sqrt_e"]

_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.(.*)")
_NORM = "mlp.linear_fc1.layer_norm_"
_MATRICES = {"mlp.linear_fc1.weight": "linear_fc1", "mlp.linear_fc2.weight": "linear_fc2"}


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """How a dense model becomes sparse."""

    model: Architecture
    """The sparse model: its experts, and which layers have them."""
    scale: Scale = "none"
    router_scale: float = 0.1
    """``--switch-init-scale`` of the routers; 0 makes them zero, so that every token goes to
    expert 0 with a gate of 1/E."""
    seed: int = 1234

    @property
    def sparse(self) -> set[tuple[str, int]]:
        """Layers that get experts, as (stack, index from 0)."""
        stacks = self.model.stacks.items()
        return {(name, layer) for name, stack in stacks for layer in stack.sparse_layers}

    def factors(self) -> tuple[float, float]:
        """Return what the first and the second matrix of an expert are multiplied by."""
        if self.scale == "none":
            return 1.0, 1.0
        root = math.sqrt(self.model.num_experts)
        linear = self.model.gated_linear_unit or self.model.activation_func == "relu"
        return (root, root) if linear else (1.0, root * root)


def upcycle(chunks: Iterable[TensorChunk], how: Upcycling) -> tuple[TensorChunk, ...]:
    """Return the chunks of the sparse model.

    Args:
        chunks: Those of the dense model, with one key for each layer.
        how: What the sparse model is to be.

    Raises:
        CheckpointError: An MLP has biases, which experts do not have, or is sparse already, or a
            layer that shall be sparse is not in the model.
    """
    sparse = how.sparse
    result: list[TensorChunk] = []
    done: set[tuple[str, int]] = set()
    for chunk in chunks:
        match = _LAYER.fullmatch(chunk.key)
        if match is None or (match[1], int(match[2])) not in sparse:
            result.append(chunk)
            continue
        layer, name = (match[1], int(match[2])), match[3]
        if name.startswith(("mlp.router", "mlp.experts")):
            raise CheckpointError(
                f"Layer {layer[1]} of the {layer[0]} has experts already; only a dense model can "
                "be upcycled."
            )
        result += _upcycled(chunk, layer, name, how)
        if name == "mlp.linear_fc1.weight":
            result.append(_router(chunk, layer, how))
            done.add(layer)
    absent = sparse - done
    if absent:
        raise CheckpointError(
            f"The dense model has no MLP in {_layers(absent)}, which shall get experts. Correct "
            "--moe-layer-freq."
        )
    return tuple(result)


def _upcycled(
    chunk: TensorChunk, layer: tuple[str, int], name: str, how: Upcycling
) -> Iterator[TensorChunk]:
    prefix = f"{layer[0]}.layers.{layer[1]}."
    if name.startswith(_NORM):
        yield replace(chunk, key=f"{prefix}pre_mlp_layernorm.{name.removeprefix(_NORM)}")
    elif name in _MATRICES:
        first, second = how.factors()
        linear = _MATRICES[name]
        factor = first if linear == "linear_fc1" else second
        # A factor passes only through what is linear: of a gated unit, the half without activation.
        half = how.model.gated_linear_unit and linear == "linear_fc1"
        stack = (how.model.num_experts, *chunk.shape)
        for expert in range(how.model.num_experts):
            yield TensorChunk(
                f"{prefix}mlp.experts.experts.{linear}.weight",
                stack,
                chunk.dtype,
                Region((expert, *chunk.region.offsets), (1, *chunk.region.sizes)),
                partial(_expert, chunk, factor, second_half=half),
            )
    elif name.startswith("mlp."):
        raise CheckpointError(
            f"The dense model has {chunk.key}, but experts have no biases. Only a model trained "
            "with --disable-bias-linear can be upcycled."
        )
    else:
        yield chunk


def _expert(chunk: TensorChunk, factor: float, *, second_half: bool) -> Tensor:
    assert chunk.region == Region.whole(chunk.shape), "matrices of a dense MLP are read whole"
    weight = chunk.make()
    if factor != 1.0:
        weight = weight.clone()
        part = weight.chunk(2)[1] if second_half else weight
        part.copy_((part.float() * factor).to(weight.dtype))
        if not bool(torch.isfinite(part).all()):
            raise CheckpointError(
                f"{chunk.key} times {factor:.4g} (--scale sqrt_e) is more than {weight.dtype} "
                "holds. Convert the model with --dtype fp32 or bf16 first."
            )
    return weight.unsqueeze(0)


def _router(chunk: TensorChunk, layer: tuple[str, int], how: Upcycling) -> TensorChunk:
    shape = (how.model.num_experts, chunk.shape[1])
    # Megatron's number of the layer: a decoder's follow those of the encoder.
    before = how.model.encoder.num_layers if how.model.encoder and layer[0] == "decoder" else 0
    return TensorChunk(
        f"{layer[0]}.layers.{layer[1]}.mlp.router.weight",
        shape,
        chunk.dtype,
        Region.whole(shape),
        partial(_draw_router, shape, before + layer[1] + 1, how, chunk.dtype),
    )


def _draw_router(
    shape: tuple[int, int], layer_number: int, how: Upcycling, dtype: torch.dtype
) -> Tensor:
    weight_ED = torch.zeros(shape)
    if how.router_scale:
        init_router_weight_(
            weight_ED, seed=how.seed, layer_number=layer_number, scale=how.router_scale
        )
    if not bool(torch.isfinite(weight_ED.to(dtype)).all()):
        raise CheckpointError(
            f"--router-scale {how.router_scale:g} draws weights that {dtype} cannot hold. Set a "
            "smaller one: --switch-init-scale is 0.1."
        )
    return weight_ED


def _layers(layers: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{stack} layer {index}" for stack, index in sorted(layers))
