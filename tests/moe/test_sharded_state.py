"""Checkpoints of our experts and of Megatron's are one format, moments included."""

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.models.backends import LocalSpecProvider
from support.layout_case import FF, D, E, Layout, Part, Problem, start_groups

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.upstream.repairs import repaired_megatron

# Torch's own loader still uses its deprecated sharded tensors, and under the emulation's function
# mode the warning looks like ours.
pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")

PREFIX = "decoder.layers.mlp.experts."
STACKED = ((0, 1, 3),)
"""Second of three stacked layers: (dim, index, number of parts)."""
ALL_LAYERS = ((0, 0, 1),)
MOVES = [
    (Layout(1), Layout(2, ep=2)),
    (Layout(4, tp=2, ep=2, etp=2), Layout(1)),
    (Layout(2, ep=2), Layout(4, ep=2, etp=2)),
]


def our_experts(part, problem):
    return part.experts(problem)


def megatron_experts(part, problem):
    config = part.experts(problem).config
    experts = LocalSpecProvider().grouped_mlp_modules(False)(
        E // part.layout.ep, config, pg_collection=part.groups
    )
    for index, expert in enumerate(experts.local_experts):
        wi = part.shard_of_wi(problem.wi_EFD, problem.gated)
        expert.linear_fc1.weight.data.copy_(wi[index])
        expert.linear_fc2.weight.data.copy_(part.shard_of_wo(problem.wo_EDF)[index])
    return experts


def moments_of(experts, state):
    """Return the sharded form of one optimizer tensor a parameter: twice its value."""
    parameters = list(experts.parameters())
    shards = get_param_id_to_sharded_param_map(state, parameters)
    assert sorted(shards) == list(range(len(parameters)))  # each parameter has exactly one
    return {
        str(index): make_sharded_optimizer_tensor(
            shards[index], parameter.detach() * 2.0, "optimizer.state.exp_avg"
        )
        for index, parameter in enumerate(parameters)
    }


def sharded(experts, offsets, metadata=None):
    return experts.sharded_state_dict(PREFIX, sharded_offsets=offsets, metadata=metadata)


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES, ids=lambda move: f"{move[0]} to {move[1]}")
def test_checkpoints_move_both_ways_between_layouts(tmp_path, move):
    source, target = move
    run_ranks(_save, source.world, source, tmp_path)
    run_ranks(_load, target.world, target, tmp_path)


def cases(folder, builders):
    """Yield a builder, a folder and a problem, for both sorts of fc1."""
    for gated in (False, True):
        problem = Problem.draw(1, capacity=1, gated=gated)
        for written_by, build in zip(("ours", "theirs"), builders, strict=True):
            path = folder / f"{written_by}-{gated}"
            path.mkdir(exist_ok=True)
            yield build, str(path), problem


def _save(rank, layout, folder):
    with repaired_megatron(), cuda_on_cpu():
        part = Part(layout, start_groups(layout))
        for build, path, problem in cases(folder, (our_experts, megatron_experts)):
            experts = build(part, problem)
            model = sharded(experts, ALL_LAYERS)
            state = {"model": model, "moments": moments_of(experts, sharded(experts, ALL_LAYERS))}
            dist_checkpointing.save(state, path)


def _load(rank, layout, folder):
    with repaired_megatron(), cuda_on_cpu():
        part = Part(layout, start_groups(layout))
        for build, path, problem in cases(folder, (megatron_experts, our_experts)):
            expected = build(part, problem)
            experts = build(part, problem)
            with torch.no_grad():
                for parameter in experts.parameters():
                    parameter.zero_()
            moments = moments_of(experts, sharded(experts, ALL_LAYERS))
            state = {"model": sharded(experts, ALL_LAYERS), "moments": moments}
            state = dist_checkpointing.load(state, path)
            model = {key.removeprefix(PREFIX): value for key, value in state["model"].items()}
            experts.load_state_dict(model, strict=True)
            pairs = zip(experts.parameters(), expected.parameters(), strict=True)
            for index, (actual, wanted) in enumerate(pairs):
                assert torch.equal(actual, wanted)
                assert torch.equal(state["moments"][str(index)].view_as(wanted), wanted * 2.0)


def test_keys_shapes_and_replicas_are_megatrons():
    run_ranks(_check_same_entries, 4)


def _check_same_entries(rank):
    layout = Layout(4, tp=2, etp=2)
    part = Part(layout, start_groups(layout))
    for gated in (False, True):
        problem = Problem.draw(1, capacity=1, gated=gated)
        for offsets in ((), STACKED):
            for separate_keys in (False, True):
                metadata = {
                    "singleton_local_shards": separate_keys,
                    "dp_cp_group": part.groups.dp_cp,
                }
                ours, theirs = (
                    _entries(sharded(build(part, problem), offsets, metadata))
                    for build in (our_experts, megatron_experts)
                )
                assert ours == theirs
                assert len(ours) == E * 2 * 2 + E * gated  # two tensors, two objects; gate and rest


def _entries(state):
    """Return all that a checkpoint knows of a state dict: keys, places, shapes and who writes."""
    entries = set()

    def visit(value):
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                visit(part)
        elif isinstance(value, ShardedTensor):
            entries.add(
                (
                    value.key,
                    value.global_shape,
                    value.global_offset,
                    value.local_shape,
                    value.axis_fragmentations,
                    value.replica_id,
                    value.prepend_axis_num,
                )
            )
        elif isinstance(value, ShardedObject):
            assert value.data is None
            entries.add((value.unique_key, value.replica_id))
        else:
            visit(value.build())

    visit(state)
    return entries


def test_plain_state_dict_round_trip():
    run_ranks(_check_plain, 1)


def _check_plain(rank):
    part = Part(Layout(1), start_groups(Layout(1)))
    experts = part.experts(Problem.draw(1, capacity=1))
    state = experts.state_dict()
    assert sorted(state) == ["_extra_state", "weight1", "weight2"]
    assert state["weight1"].shape == (E, FF, D)
    experts.load_state_dict(state, strict=True)
    assert dist.get_world_size() == 1
