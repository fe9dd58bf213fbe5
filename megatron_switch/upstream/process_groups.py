"""Megatron's process groups under our names, compared with our arithmetic.

The names are those of :data:`megatron_switch.layout.grid.GROUP_NAMES`. A rank can only ask for
the groups that it is in, so each rank checks its own; together they check all.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_switch.errors import ConfigError, UpstreamError
from megatron_switch.layout.grid import Layout

MEGATRON_GROUPS: Mapping[str, Callable[[], dist.ProcessGroup | None]] = {
    "tp": mpu.get_tensor_model_parallel_group,
    "cp": mpu.get_context_parallel_group,
    "dp": partial(mpu.get_data_parallel_group, with_gtp_remat=False),
    "pp": mpu.get_pipeline_model_parallel_group,
    "mp": mpu.get_model_parallel_group,
    "dp_cp": partial(mpu.get_data_parallel_group, with_context_parallel=True, with_gtp_remat=False),
    "tp_cp": mpu.get_tensor_and_context_parallel_group,
    "tp_dp": mpu.get_tensor_and_data_parallel_group,
    "tp_dp_cp": partial(mpu.get_tensor_and_data_parallel_group, with_context_parallel=True),
    "etp": mpu.get_expert_tensor_parallel_group,
    "ep": mpu.get_expert_model_parallel_group,
    "edp": partial(mpu.get_expert_data_parallel_group, with_gtp_remat=False),
    "etp_ep": mpu.get_expert_tensor_and_model_parallel_group,
    "etp_ep_pp": mpu.get_expert_tensor_model_pipeline_parallel_group,
    "embedding": partial(mpu.get_embedding_group, check_initialized=False),
    "position_embedding": partial(mpu.get_position_embedding_group, check_initialized=False),
}
"""This rank's group of each name, or None where it is in none. Without GTP, which is refused."""


def refuse_other_sizes(layout: Layout) -> None:
    """Raise ConfigError if the groups that exist already have other sizes than ``layout``."""
    asked = {axis: len(layout.group(axis, 0)) for axis in ("tp", "cp", "pp", "ep", "etp")}
    existing = {axis: dist.get_world_size(MEGATRON_GROUPS[axis]()) for axis in asked}
    asked["vp"] = layout.vp
    existing["vp"] = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    differ = [
        f"{axis.upper()} {existing[axis]}, not {asked[axis]}"
        for axis in asked
        if asked[axis] != existing[axis]
    ]
    if differ:
        raise ConfigError(
            f"Process groups exist already, with other sizes: {'; '.join(differ)}. Call "
            "destroy_model_parallel() before building another layout."
        )


def check_groups(
    layout: Layout,
    get_embedding_ranks: Callable[..., list[int]] | None,
    get_position_embedding_ranks: Callable[..., list[int]] | None,
) -> None:
    """Compare each of Megatron's groups of this rank with the members that we compute.

    Args:
        layout: The ranks.
        get_embedding_ranks: What chose the stages with word embeddings; None for the default.
        get_position_embedding_ranks: The same for position embeddings.

    Raises:
        UpstreamError: If a group has other members; it names group, rank, expected and found.
    """
    rank = dist.get_rank()
    chosen = {"embedding": get_embedding_ranks, "position_embedding": get_position_embedding_ranks}
    for name, megatron_group in MEGATRON_GROUPS.items():
        expected = layout.group(name, rank)
        choose = chosen.get(name)
        if choose is not None:
            ends = sorted(choose(layout.group("pp", rank)))
            expected = ends if rank in ends else []
        group = megatron_group()
        found = [] if group is None else dist.get_process_group_ranks(group)
        if found != expected:
            raise UpstreamError(
                f"Megatron's {name} group of rank {rank} must have ranks {expected}, but has "
                f"{found}. The installed megatron-core lays out ranks in another way than the "
                "version this project was checked with; install that version."
            )
