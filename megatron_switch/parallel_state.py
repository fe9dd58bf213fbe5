"""Process groups: Megatron's own, checked rank by rank against our arithmetic, and a few of ours.

Guaranteed: after :func:`initialize_model_parallel` every group of this rank that Megatron built
has exactly the members that :class:`~megatron_switch.layout.grid.Layout` computes, embedding
groups included; otherwise :class:`~megatron_switch.errors.UpstreamError` names group, rank,
expected and found. Illegal sizes are refused before any group exists.

Megatron keeps its groups, in ``megatron.core.parallel_state``; this module only remembers which
layout they form, and the groups that Megatron has no word for (expert groups inside and across
nodes). Megatron's accessors for one axis are re-exported under their own names.

Refused: weight rematerialisation axes (GTP), rank offsets and grids over a part of the ranks,
because our grid has no such axes.

Call it once ``torch.distributed`` is initialised, before ``megatron.training.pretrain``: pretrain
then finds both initialised and skips them (``training/initialize.py``).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.distributed.device_mesh import DeviceMesh

from megatron_switch.errors import ConfigError, LayoutError
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.nodes import (
    GroupSpread,
    NodeExpertGroups,
    expert_node_groups,
    spread_of,
)
from megatron_switch.layout.sizes import DEFAULT_ORDER
from megatron_switch.upstream.process_groups import (
    MEGATRON_GROUPS,
    check_groups,
    refuse_other_sizes,
)

# Megatron's accessors for one axis, under Megatron's names.
get_tensor_model_parallel_group = mpu.get_tensor_model_parallel_group
get_tensor_model_parallel_rank = mpu.get_tensor_model_parallel_rank
get_tensor_model_parallel_world_size = mpu.get_tensor_model_parallel_world_size
get_pipeline_model_parallel_group = mpu.get_pipeline_model_parallel_group
get_pipeline_model_parallel_rank = mpu.get_pipeline_model_parallel_rank
get_pipeline_model_parallel_world_size = mpu.get_pipeline_model_parallel_world_size
get_context_parallel_group = mpu.get_context_parallel_group
get_context_parallel_rank = mpu.get_context_parallel_rank
get_context_parallel_world_size = mpu.get_context_parallel_world_size
get_data_parallel_group = mpu.get_data_parallel_group
get_data_parallel_rank = mpu.get_data_parallel_rank
get_data_parallel_world_size = mpu.get_data_parallel_world_size
get_expert_model_parallel_group = mpu.get_expert_model_parallel_group
get_expert_model_parallel_rank = mpu.get_expert_model_parallel_rank
get_expert_model_parallel_world_size = mpu.get_expert_model_parallel_world_size
get_expert_tensor_parallel_group = mpu.get_expert_tensor_parallel_group
get_expert_tensor_parallel_rank = mpu.get_expert_tensor_parallel_rank
get_expert_tensor_parallel_world_size = mpu.get_expert_tensor_parallel_world_size
get_expert_data_parallel_group = mpu.get_expert_data_parallel_group
get_expert_data_parallel_rank = mpu.get_expert_data_parallel_rank
get_expert_data_parallel_world_size = mpu.get_expert_data_parallel_world_size

MESH_AXES = ("pipeline", "data", "expert", "model")
"""Axes of :func:`device_mesh`, outermost first: PP, EDP, EP and ETP of the expert grid."""

PRETRAIN_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
"""Sizes that Megatron's pretrain passes when it makes the groups itself: parameter (and args
attribute) -> size of our layout, whose order it passes as well."""

PRETRAIN_OPTIONS = {
    "pipeline_model_parallel_comm_backend": "pipeline_model_parallel_comm_backend",
    "use_sharp": "use_sharp",
    "gtp_remat_size": "gtp_weight_remat_size",
    "expert_gtp_remat_size": "expert_gtp_weight_remat_size",
    "hierarchical_context_parallel_sizes": "hierarchical_context_parallel_sizes",
    "hybrid_context_parallel": "hybrid_context_parallel",
    "num_distributed_optimizer_instances": "num_distributed_optimizer_instances",
    "distributed_timeout_minutes": "distributed_timeout_minutes",
    "nccl_communicator_config_path": "nccl_communicator_config_path",
    "create_gloo_process_groups": "use_gloo_process_groups",
    "high_priority_stream_groups": "high_priority_stream_groups",
    "sharp_enabled_group": "sharp_enabled_group",
}
"""What it passes besides: parameter -> args attribute. (Two embedding callables are its own.)"""

_UNUSED_AXES: Mapping[str, tuple[int | None, ...]] = {
    "gtp_remat_size": (None, 1),
    "expert_gtp_remat_size": (None, 1),
    "rank_offset": (None, 0),
    "local_world_size": (None,),
}
"""Parameters of Megatron that our grid does not know, with the values that leave them unused."""


@dataclass(frozen=True)
class _State:
    layout: Layout
    node_groups: dict[int, NodeExpertGroups[dist.ProcessGroup]] = field(default_factory=dict)


_state: _State | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    context_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    order: str = DEFAULT_ORDER,
    **megatron: Any,
) -> Layout:
    """Let Megatron build its process groups, and check each of them against our grid.

    Every rank must call this. Where Megatron's groups exist already, they are checked instead
    of built, so that calling twice with the same sizes is harmless.

    Args:
        tensor_model_parallel_size: Ranks over which a dense layer is cut (TP).
        pipeline_model_parallel_size: Pipeline stages (PP).
        expert_model_parallel_size: Ranks over which the experts of a layer are spread (EP).
        expert_tensor_parallel_size: Ranks over which one expert is cut (ETP); None is TP.
        context_parallel_size: Ranks over which a sequence is cut (CP).
        virtual_pipeline_model_parallel_size: Model chunks per stage; None for no interleaving.
        order: Which axis varies fastest from rank to rank.
        **megatron: Further parameters of ``megatron.core.parallel_state``'s function of the same
            name, handed on unchanged.

    Returns:
        The layout that the groups form.

    Raises:
        ConfigError: If ``torch.distributed`` is not initialised, or other groups exist already.
        LayoutError: If the sizes form no grid, or name an axis that this project does not know.
        UpstreamError: If a group of Megatron has other members than our grid says.
    """
    _require_torch_distributed()
    layout = Layout(
        dist.get_world_size(),
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        pp=pipeline_model_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        vp=virtual_pipeline_model_parallel_size,
        order=order,
    )
    _build_and_check(layout, megatron)
    return layout


def initialize_model_parallel_as_pretrain(layout: Layout, values: Mapping[str, Any]) -> None:
    """Build and check the groups exactly as ``megatron.training.pretrain`` would have.

    Nothing that a user set is lost when pretrain later skips this step: communicator options,
    timeouts, gloo groups, high-priority streams, SHARP.

    Args:
        layout: The layout of these arguments, checked.
        values: Megatron's validated arguments by name: ``vars(args)``.

    Raises:
        ConfigError: If a value that Megatron's pretrain reads is missing, or as in
            :func:`initialize_model_parallel`.
        LayoutError: As in :func:`initialize_model_parallel`.
        UpstreamError: As in :func:`initialize_model_parallel`.
    """
    _require_torch_distributed()
    missing = {*PRETRAIN_SIZES, *PRETRAIN_OPTIONS.values()} - values.keys()
    if missing:
        raise ConfigError(
            "Process groups are built from Megatron's validated arguments, but "
            f"{', '.join(sorted(missing))} are missing. Pass vars(args) after validate_args."
        )
    for name, size in PRETRAIN_SIZES.items():
        given = values[name] or 1
        assert given == getattr(layout, size), f"{name} is {given}, not as in {layout}"
    options = {parameter: values[name] for parameter, name in PRETRAIN_OPTIONS.items()}
    _build_and_check(layout, options)


def destroy_model_parallel() -> None:
    """Forget Megatron's groups and ours; ``torch.distributed`` stays initialised."""
    global _state
    _state = None
    mpu.destroy_model_parallel()


def is_initialized() -> bool:
    """Return whether :func:`initialize_model_parallel` has built or checked the groups."""
    return _state is not None and bool(mpu.model_parallel_is_initialized())


def get_layout() -> Layout:
    """Return the layout that the process groups form.

    Raises:
        ConfigError: If :func:`initialize_model_parallel` was not called.
    """
    return _require_state().layout


def get_process_group(name: str) -> dist.ProcessGroup:
    """Return this rank's group by its name in :data:`~megatron_switch.layout.grid.GROUP_NAMES`.

    Raises:
        ConfigError: If the groups do not exist yet.
        LayoutError: If there is no group of that name, or this rank is not in one.
    """
    get_layout().group(name, dist.get_rank())  # refuses an unknown name
    group = MEGATRON_GROUPS[name]()
    if group is None:
        raise LayoutError(
            f"Rank {dist.get_rank()} is in no {name} group: only the ends of a pipeline are. "
            f"Ask get_layout().group('{name}', rank) first."
        )
    return group


def get_local_experts(num_experts: int) -> range:
    """Return the global indices of the experts that this rank holds, whole or in part."""
    return get_layout().experts_of(dist.get_rank(), num_experts)


def get_node_expert_groups(
    ranks_per_node: int | None = None,
) -> NodeExpertGroups[dist.ProcessGroup]:
    """Return this rank's expert groups inside its node and across nodes; build them once.

    The first call is collective: every rank must make it, in the same order among other calls
    that build groups, because ``torch.distributed`` builds a group on all ranks at once.

    Args:
        ranks_per_node: Ranks on each node; None reads ``LOCAL_WORLD_SIZE``.

    Raises:
        ConfigError: If the groups do not exist yet, or ranks per node is not known.
        LayoutError: If an expert-parallel group is not spread evenly over its nodes.
    """
    state = _require_state()
    per_node = _local_world_size() if ranks_per_node is None else ranks_per_node
    if per_node not in state.node_groups:
        cut = expert_node_groups(state.layout, per_node)
        state.node_groups[per_node] = NodeExpertGroups(
            inside=_create_groups(cut.inside, "EXPERT_INSIDE_NODE_GROUP"),
            across=_create_groups(cut.across, "EXPERT_ACROSS_NODES_GROUP"),
        )
    return state.node_groups[per_node]


def get_group_spread(
    name: str, *, ranks_per_node: int | None = None, nodes_per_leaf: int | None = None
) -> GroupSpread:
    """Return over how many nodes, and leaf switches, this rank's group is spread.

    Args:
        name: One of :data:`~megatron_switch.layout.grid.GROUP_NAMES`.
        ranks_per_node: Ranks on each node; None reads ``LOCAL_WORLD_SIZE``.
        nodes_per_leaf: Nodes under each leaf switch; None counts all nodes as under one.

    Raises:
        ConfigError: If the groups do not exist yet, or ranks per node is not known.
        LayoutError: If there is no group of that name.
    """
    ranks = get_layout().group(name, dist.get_rank())
    per_node = _local_world_size() if ranks_per_node is None else ranks_per_node
    return spread_of(ranks, per_node, nodes_per_leaf)


def device_mesh(device_type: str | None = None) -> DeviceMesh:
    """Return a torch ``DeviceMesh`` over the existing groups; no group is created.

    Its axes are those of the expert grid, on which Switch Transformers are described, outermost
    first: ``pipeline`` (PP), ``data`` (EDP: copies of an expert), ``expert`` (EP: different
    experts) and ``model`` (ETP: parts of one expert). With ETP = TP, and no context parallelism,
    ``model`` is the tensor-parallel group and ``data`` x ``expert`` the data-parallel group of
    the dense layers; with another ETP the dense layers are cut along other lines, which
    :func:`get_process_group` gives.

    Args:
        device_type: "cuda" or "cpu"; None follows the backend of ``torch.distributed``.

    Raises:
        ConfigError: If :func:`initialize_model_parallel` was not called.
    """
    layout = get_layout()
    if device_type is None:
        device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    ranks = torch.empty(layout.pp, layout.edp, layout.ep, layout.etp, dtype=torch.int)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        ranks[at.pp, at.edp, at.ep, at.etp] = rank
    groups = [get_process_group(name) for name in ("pp", "edp", "ep", "etp")]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=MESH_AXES)


def _require_torch_distributed() -> None:
    if not dist.is_initialized():
        raise ConfigError(
            "Process groups need torch.distributed, which is not initialised. Call "
            "torch.distributed.init_process_group first (torchrun or the launcher sets RANK and "
            "WORLD_SIZE)."
        )


def _build_and_check(layout: Layout, megatron: Mapping[str, Any]) -> None:
    """Have Megatron build the groups of ``layout`` where there are none; then check them."""
    global _state
    _refuse_other_axes(megatron)
    if mpu.model_parallel_is_initialized():
        refuse_other_sizes(layout)
    else:
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            order=layout.order,
            **megatron,
        )
    check_groups(
        layout, megatron.get("get_embedding_ranks"), megatron.get("get_position_embedding_ranks")
    )
    if _state is None or _state.layout != layout:
        _state = _State(layout)


def _require_state() -> _State:
    if _state is None or not mpu.model_parallel_is_initialized():
        raise ConfigError(
            "Process groups do not exist yet. Call "
            "megatron_switch.parallel_state.initialize_model_parallel on every rank first."
        )
    return _state


def _refuse_other_axes(megatron: Mapping[str, Any]) -> None:
    for name, unused in _UNUSED_AXES.items():
        if megatron.get(name) not in unused:
            raise LayoutError(
                f"Ranks form a dense and an expert grid over the whole job, but {name} is "
                f"{megatron[name]}. Omit it (the flags of the first two are "
                "--tensor-parallel-num-weight-shards, --expert-tensor-parallel-num-weight-shards)."
            )


def _create_groups(groups: list[list[int]], description: str) -> dist.ProcessGroup:
    """Create all groups, on every rank in the same order, and return this rank's."""
    mine: dist.ProcessGroup | None = None
    for ranks in groups:
        group: dist.ProcessGroup = mpu.create_group(ranks, group_desc=description)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None, f"rank {dist.get_rank()} is in no {description}"
    return mine


def _local_world_size() -> int:
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not value.isdigit():
        raise ConfigError(
            "What depends on nodes needs the number of ranks on a node, but LOCAL_WORLD_SIZE is "
            f"'{value}'. Start with torchrun or the launcher, or pass ranks_per_node."
        )
    return int(value)
