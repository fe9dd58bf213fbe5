"""Megatron's groups equal ours on real ranks; what is asked for wrongly is refused in words."""

import ast
import inspect
import os
import re
from pathlib import Path

import megatron.core
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_switch import parallel_state
from megatron_switch.errors import ConfigError, LayoutError, UpstreamError
from megatron_switch.layout.grid import GROUP_NAMES, Layout
from megatron_switch.layout.sizes import TP_PP_DP_ORDER
from megatron_switch.testing.ranks import run_ranks

LAYOUTS_OF_8 = [
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": 2,
    },
    {
        "context_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "order": TP_PP_DP_ORDER,
    },
]


def test_every_group_of_every_rank_is_megatrons():
    run_ranks(_check_every_group, 8)


def _check_every_group(rank):
    for sizes in LAYOUTS_OF_8:
        layout = parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        assert parallel_state.is_initialized()
        assert parallel_state.get_layout() == layout
        for name in GROUP_NAMES:
            members = layout.group(name, rank)
            if members:
                group = parallel_state.get_process_group(name)
                assert dist.get_process_group_ranks(group) == members
        at = layout.coordinates(rank)
        assert parallel_state.get_tensor_model_parallel_rank() == at.tp
        assert parallel_state.get_context_parallel_rank() == at.cp
        assert parallel_state.get_pipeline_model_parallel_rank() == at.pp
        assert parallel_state.get_data_parallel_rank() == at.dp
        assert parallel_state.get_expert_model_parallel_rank() == at.ep
        assert parallel_state.get_expert_tensor_parallel_rank() == at.etp
        assert parallel_state.get_expert_data_parallel_rank() == at.edp
        assert parallel_state.get_expert_model_parallel_world_size() == layout.ep
        assert parallel_state.get_local_experts(8) == layout.experts_of(rank, 8)
        _check_device_mesh(layout, rank)
        parallel_state.destroy_model_parallel()
        assert not parallel_state.is_initialized()


def _check_device_mesh(layout, rank):
    """Axes have the groups of the expert grid, and collectives on them reach those ranks."""
    mesh = parallel_state.device_mesh()
    assert mesh.mesh_dim_names == ("pipeline", "data", "expert", "model")
    assert mesh.shape == (layout.pp, layout.edp, layout.ep, layout.etp)
    at = layout.coordinates(rank)
    assert list(mesh.get_coordinate()) == [at.pp, at.edp, at.ep, at.etp]
    groups = {"pipeline": "pp", "data": "edp", "expert": "ep", "model": "etp"}
    for axis, name in groups.items():
        assert mesh.get_group(axis) is parallel_state.get_process_group(name)
        total = torch.tensor([rank])
        dist.all_reduce(total, group=mesh[axis].get_group())
        assert total.item() == sum(layout.group(name, rank))


def test_tensors_are_spread_over_axes_of_the_mesh():
    run_ranks(_check_distributed_tensor, 4)


def _check_distributed_tensor(rank):
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, expert_model_parallel_size=2
    )
    mesh = parallel_state.device_mesh()["expert", "model"]
    experts_EF = torch.arange(8.0).view(4, 2)
    spread = distribute_tensor(experts_EF, mesh, [Shard(0), Shard(1)])
    at = parallel_state.get_layout().coordinates(rank)
    held = parallel_state.get_local_experts(4)
    expected = experts_EF[held.start : held.stop, at.etp : at.etp + 1]
    torch.testing.assert_close(spread.to_local(), expected)
    whole = spread.redistribute(mesh, [Replicate(), Replicate()]).to_local()
    torch.testing.assert_close(whole, experts_EF)


def test_expert_groups_inside_and_across_nodes():
    run_ranks(_check_node_groups, 8)


def _check_node_groups(rank):
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=8, create_gloo_process_groups=False
    )
    groups = parallel_state.get_node_expert_groups()
    node, place = divmod(rank, 4)
    assert dist.get_process_group_ranks(groups.inside) == [node * 4 + i for i in range(4)]
    assert dist.get_process_group_ranks(groups.across) == [place, place + 4]
    assert parallel_state.get_node_expert_groups() is groups  # built once
    pairs = parallel_state.get_node_expert_groups(ranks_per_node=2)
    assert dist.get_process_group_ranks(pairs.inside) == [rank // 2 * 2, rank // 2 * 2 + 1]

    # An all-to-all inside nodes, then one across, is one over the whole expert-parallel group.
    sent = torch.arange(8) + 100 * rank
    direct = torch.empty_like(sent)
    dist.all_to_all_single(direct, sent, group=parallel_state.get_process_group("ep"))
    inside = torch.empty(4, 2, dtype=sent.dtype)
    dist.all_to_all_single(inside, sent.view(2, 4).t().contiguous(), group=groups.inside)
    across = torch.empty(2, 4, dtype=sent.dtype)
    dist.all_to_all_single(across, inside.t().contiguous(), group=groups.across)
    torch.testing.assert_close(across.view(-1), direct)


def test_every_rank_knows_where_its_groups_run():
    run_ranks(_check_spreads, 4)


def _check_spreads(rank):
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2)
    spread = parallel_state.get_group_spread
    assert spread("tp", ranks_per_node=2).nodes == 1
    far = spread("ep", ranks_per_node=2, nodes_per_leaf=1)
    assert (far.members, far.per_node, far.nodes, far.leaves) == (2, 1, 2, 2)
    assert spread("ep", ranks_per_node=2).leaves == 1  # of leaves nothing was said
    assert spread("ep").nodes == 1  # LOCAL_WORLD_SIZE is 4
    with pytest.raises(LayoutError, match="no group called 'bogus'"):
        spread("bogus")


def test_calling_twice_is_harmless_and_other_sizes_are_refused():
    run_ranks(_check_second_call, 4)


def _check_second_call(rank):
    first = parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    group = parallel_state.get_process_group("ep")
    assert parallel_state.initialize_model_parallel(expert_model_parallel_size=2) == first
    assert parallel_state.get_process_group("ep") is group
    with pytest.raises(ConfigError, match=r"exist already.*: TP 1, not 2; EP 2, not 1; ETP 1, not"):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)

    # Groups that Megatron built by itself are checked and taken over.
    parallel_state.destroy_model_parallel()
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"do not exist yet\. Call .*initialize_model_parallel"):
        parallel_state.get_layout()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert parallel_state.get_layout() == Layout(4, tp=2)

    # They have the same sizes in another order of ranks, and so other members.
    parallel_state.destroy_model_parallel()
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, order="pp-tp-cp-ep-dp"
    )
    members = re.escape(f"must have ranks {[rank // 2 * 2, rank // 2 * 2 + 1]}, but has")
    with pytest.raises(UpstreamError, match=rf"Megatron's tp group of rank {rank} {members}"):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=2, pipeline_model_parallel_size=2
        )


def test_chosen_embedding_stages_are_checked_too():
    run_ranks(_check_chosen_embedding_ranks, 4)


def _check_chosen_embedding_ranks(rank):
    def first_two(pipeline, *_):
        return pipeline[:2]

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=4,
        get_embedding_ranks=first_two,
        get_position_embedding_ranks=first_two,
    )
    if rank < 2:
        assert dist.get_process_group_ranks(parallel_state.get_process_group("embedding")) == [0, 1]
    else:
        with pytest.raises(LayoutError, match=rf"Rank {rank} is in no embedding group"):
            parallel_state.get_process_group("embedding")
    with pytest.raises(LayoutError, match=r"no group called 'experts'; groups are tp, cp"):
        parallel_state.get_process_group("experts")


def test_what_pretrain_would_have_passed_is_passed():
    run_ranks(_check_as_pretrain, 4)


def _check_as_pretrain(rank):
    values = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_comm_backend": None,
        "use_sharp": False,
        "gtp_weight_remat_size": 1,
        "expert_gtp_weight_remat_size": 1,
        "context_parallel_size": 1,
        "hierarchical_context_parallel_sizes": None,
        "hybrid_context_parallel": False,
        "expert_model_parallel_size": 2,
        "num_distributed_optimizer_instances": 1,
        "expert_tensor_parallel_size": 1,
        "distributed_timeout_minutes": 3,
        "nccl_communicator_config_path": None,
        "use_gloo_process_groups": True,
        "high_priority_stream_groups": [],
        "sharp_enabled_group": None,
    }
    layout = Layout(4, tp=2, pp=2, ep=2, etp=1, order=TP_PP_DP_ORDER)
    parallel_state.initialize_model_parallel_as_pretrain(layout, values)
    assert parallel_state.get_layout() is layout
    assert dist.get_process_group_ranks(mpu.get_pipeline_model_parallel_group()) == layout.group(
        "pp", rank
    )
    assert mpu.get_data_parallel_group_gloo() is not None
    timeout = parallel_state.get_process_group("tp")._get_backend(torch.device("cpu")).options
    assert timeout._timeout.total_seconds() == 180

    parallel_state.destroy_model_parallel()
    del values["use_sharp"]
    with pytest.raises(ConfigError, match=r"validated arguments, but use_sharp are missing"):
        parallel_state.initialize_model_parallel_as_pretrain(layout, values)
    with pytest.raises(LayoutError, match=r"gtp_remat_size is 2.*--tensor-parallel-num-weight"):
        parallel_state.initialize_model_parallel_as_pretrain(
            layout, {**values, "use_sharp": False, "gtp_weight_remat_size": 2}
        )
    with pytest.raises(AssertionError, match=r"context_parallel_size is 2, not as in Layout"):
        parallel_state.initialize_model_parallel_as_pretrain(
            layout, {**values, "use_sharp": False, "context_parallel_size": 2}
        )
    with pytest.raises(LayoutError, match=r"local_world_size is 2\. Omit it"):
        parallel_state.initialize_model_parallel(local_world_size=2)


def test_the_table_of_pretrains_arguments_is_that_of_the_installed_megatron():
    # Read, not imported: megatron.training takes seconds to import.
    source = Path(megatron.core.__file__).parents[1] / "training" / "initialize.py"
    tree = ast.parse(source.read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "mpu.initialize_model_parallel"
    ]
    assert len(calls) == 1
    names = list(inspect.signature(mpu.initialize_model_parallel).parameters)
    passed = dict(zip(names, calls[0].args, strict=False))
    passed |= {keyword.arg: keyword.value for keyword in calls[0].keywords}
    passed = {name: ast.unparse(value) for name, value in passed.items()}
    sizes = {name: name for name in parallel_state.PRETRAIN_SIZES}
    table = {**sizes, **parallel_state.PRETRAIN_OPTIONS}
    assert passed == {
        **{parameter: f"args.{name}" for parameter, name in table.items()},
        "order": "'tp-cp-ep-dp-pp' if not args.use_tp_pp_dp_mapping else 'tp-cp-ep-pp-dp'",
        "get_embedding_ranks": "get_embedding_ranks",
        "get_position_embedding_ranks": "get_position_embedding_ranks",
    }


def test_illegal_sizes_are_refused_before_any_group_exists():
    run_ranks(_check_illegal_sizes, 4)


def _check_illegal_sizes(rank):
    with pytest.raises(LayoutError, match=r"4 ranks cannot form the expert grid"):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=3)
    assert not mpu.model_parallel_is_initialized()
    assert mpu._global_process_group_list is None
    parallel_state.initialize_model_parallel(expert_model_parallel_size=4)
    os.environ["LOCAL_WORLD_SIZE"] = ""
    with pytest.raises(ConfigError, match=r"number of ranks on a node, but LOCAL_WORLD_SIZE is ''"):
        parallel_state.get_node_expert_groups()
    with pytest.raises(LayoutError, match=r"has 3 on node 0, 1 on node 1"):
        parallel_state.get_node_expert_groups(ranks_per_node=3)


def test_torch_distributed_comes_first():
    with pytest.raises(ConfigError, match=r"torch\.distributed, which is not initialised\. Call"):
        parallel_state.initialize_model_parallel()
