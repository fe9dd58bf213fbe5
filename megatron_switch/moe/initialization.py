"""Initial weights of experts and router: the same numbers in every layout.

A weight is a function of (seed, layer number, global expert index, which matrix, row, column), not
of a rank's random stream: experts differ, and neither tensor, pipeline nor expert parallelism nor
the order of construction changes them. Two ways to draw:

* With a scale ``s``: a normal distribution with standard deviation ``sqrt(s / fan-in)``, cut at two
  of them, fan-in counted over the whole expert. It comes from the counter of
  :mod:`megatron_switch.moe.counter_rng`, so a rank draws its own shard and nothing else.
* Without: Megatron's own ``init_method``. It takes a tensor and draws from torch's generator, so it
  fills a whole matrix on the CPU, under a generator state that is put back afterwards.

Shape letters:

    E, e  experts, local experts    F  expert hidden width    D  model

Sources:
    Switch Transformer, https://arxiv.org/abs/2101.03961, section 2.4 (truncated normal, s = 0.1).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from megatron_switch.moe.counter_rng import mix, uniform
from megatron_switch.upstream.private import has_values

InitMethod = Callable[[Tensor], object]
"""Fills a tensor in place, from torch's default generator."""

_CUT = 2.0
"""Where the normal distribution is cut, in standard deviations."""

_ROUTER, _FIRST, _SECOND = 0, 1, 2
"""Which matrix of a layer a key is for."""


def init_router_weight_(
    weight_ED: Tensor,
    *,
    seed: int,
    layer_number: int,
    scale: float | None,
    init_method: InitMethod | None = None,
) -> None:
    """Draw the router's weight, in place.

    Args:
        weight_ED: Router weight, shape (E, D).
        seed: Seed of the run.
        layer_number: 1-based number of the layer in the whole model.
        scale: ``--switch-init-scale``; None for ``init_method``.
        init_method: Megatron's ``config.init_method``; used where ``scale`` is None.
    """
    _draw_(
        weight_ED,
        key=mix(seed, layer_number, 0, _ROUTER),
        scale=scale,
        fan_in=weight_ED.shape[1],
        whole_shape=(weight_ED.shape[0], weight_ED.shape[1]),
        rows=[slice(0, weight_ED.shape[0])],
        first_column=0,
        init_method=init_method,
    )


def init_expert_weight_(
    weight: Tensor,
    *,
    matrix: Literal["fc1", "fc2"],
    seed: int,
    layer_number: int,
    expert: int,
    scale: float | None,
    init_method: InitMethod | None,
    shard: int,
    num_shards: int,
    gated: bool,
) -> None:
    """Draw one matrix of one expert, or this rank's shard of it, in place.

    Args:
        weight: Shape (F / num_shards, D) for fc1, twice as many rows where gated (the shard of the
            gate's rows, then that of the others); (D, F / num_shards) for fc2.
        matrix: Which one.
        seed: Seed of the run.
        layer_number: 1-based number of the layer in the whole model.
        expert: Index of the expert in the whole layer.
        scale: ``--switch-init-scale``; None for ``init_method``.
        init_method: Megatron's ``config.init_method`` or ``config.output_layer_init_method``; used
            where ``scale`` is None.
        shard: Expert-tensor-parallel rank.
        num_shards: Expert-tensor-parallel size.
        gated: Whether fc1 holds two matrices on top of each other.
    """
    num_rows, num_columns = weight.shape
    if matrix == "fc1":
        halves = 2 if gated else 1
        height = num_rows // halves
        starts = [(half * num_shards + shard) * height for half in range(halves)]
        rows = [slice(start, start + height) for start in starts]
        whole_shape, first_column = (num_rows * num_shards, num_columns), 0
    else:
        rows = [slice(0, num_rows)]
        whole_shape, first_column = (num_rows, num_columns * num_shards), shard * num_columns
    _draw_(
        weight,
        key=mix(seed, layer_number, expert, _FIRST if matrix == "fc1" else _SECOND),
        scale=scale,
        fan_in=whole_shape[1],
        whole_shape=whole_shape,
        rows=rows,
        first_column=first_column,
        init_method=init_method,
    )


@torch.no_grad()
def _draw_(
    weight: Tensor,
    *,
    key: Tensor,
    scale: float | None,
    fan_in: int,
    whole_shape: tuple[int, int],
    rows: Sequence[slice],
    first_column: int,
    init_method: InitMethod | None,
) -> None:
    """Fill ``weight`` with the given rows, and columns from the given one on, of a whole matrix."""
    if not has_values(weight):  # nothing to fill
        return
    num_columns = weight.shape[1]
    if scale is None:
        assert init_method is not None, "neither a scale nor a method to draw with"
        whole = _drawn_by(init_method, whole_shape, key)
        columns = slice(first_column, first_column + num_columns)
        weight.copy_(torch.cat([whole[part, columns] for part in rows]))
        return
    row = torch.cat([torch.arange(part.start, part.stop, device=weight.device) for part in rows])
    numbers = uniform(mix(key, row), num_columns, first_column=first_column)
    weight.copy_(truncated_normal(numbers).mul_(math.sqrt(scale / fan_in)))


def truncated_normal(uniform_numbers: Tensor) -> Tensor:
    """Turn numbers in [0, 1) into normal ones of mean 0 and deviation 1, cut at +-2; in place."""
    # Inverse transform sampling, from the part of the uniform interval that lies within the cut.
    reach = math.erf(_CUT / math.sqrt(2.0))
    normal = uniform_numbers.mul_(2.0).sub_(1.0).mul_(reach).erfinv_().mul_(math.sqrt(2.0))
    return normal.clamp_(-_CUT, _CUT)


def _drawn_by(init_method: InitMethod, shape: tuple[int, int], key: Tensor) -> Tensor:
    """Return a whole matrix drawn by Megatron's method, from a generator seeded with the key."""
    whole = torch.empty(shape, dtype=torch.float32, device="cpu")
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(int(key))
        init_method(whole)
    return whole
