"""Process groups say over how many nodes and leaf switches they are spread."""

import pytest

from megatron_switch import parallel_state
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.errors import LayoutError
from megatron_switch.testing.ranks import run_ranks


@pytest.mark.slow
def test_every_rank_knows_where_its_groups_run():
    run_ranks(_check_spreads, 4)


def _check_spreads(rank):
    with cuda_on_cpu():
        parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2)
        spread = parallel_state.get_group_spread
        assert spread("tp", ranks_per_node=2).nodes == 1
        far = spread("ep", ranks_per_node=2, nodes_per_leaf=1)
        assert (far.members, far.per_node, far.nodes, far.leaves) == (2, 1, 2, 2)
        assert spread("ep", ranks_per_node=2).leaves == 1  # of leaves nothing was said
        assert spread("ep").nodes == 1  # LOCAL_WORLD_SIZE is 4
        with pytest.raises(LayoutError, match="no group called 'bogus'"):
            spread("bogus")
