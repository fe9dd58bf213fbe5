"""What Megatron-Core 0.19.2 computes differently in different layouts, and this package does not.

Each test shows Megatron's own number first, so that it fails when a later Megatron is right, and
then ours. The same promises are kept for whole models by ``megatron-switch check-layouts``.
"""

import torch
import torch.distributed as dist
from layout_case import D, E, Layout, S, start_groups, switch_config
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from switch_case import Case, build_layer

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.moe.loss_tokens import set_loss_tokens
from megatron_switch.testing.ranks import run_ranks

IN_LOSS = 8
GROUP_NAMES = ("tp", "cp", "tp_cp", "tp_dp_cp", "dp", "dp_cp", "ep", "expt_tp", "tp_ep", "expt_dp")


def hidden_MSBD():
    """Two micro-batches."""
    random = torch.Generator().manual_seed(4)
    return torch.randn(2, S, 2, D, generator=random, dtype=torch.float64)


def alone():
    """The groups of a rank that shares nothing; every rank must call."""
    mine, _ = dist.new_subgroups(1)
    return ProcessGroupCollection(**dict.fromkeys(GROUP_NAMES, mine))


def megatrons_gradient(layout, groups, hidden_SBD, kind, **changes):
    """The balancing loss's gradient of Megatron's router, on this rank."""
    config = switch_config(
        layout, moe_router_load_balancing_type=kind, moe_aux_loss_coeff=1.0, **changes
    )
    router = TopKRouter(config, pg_collection=groups)
    router.layer_number = 1
    weight = torch.randn(E, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    router.weight.data.copy_(weight)
    probs, _ = router(hidden_SBD)
    (probs.sum() * 0.0).backward()
    return router.weight.grad


def ours(layout, groups, hidden_SBD, **changes):
    """The same of our router."""
    get_cuda_rng_tracker().reset()
    layer = build_layer(Case(config={"moe_z_loss_coeff": None}), layout, groups, **changes)
    set_loss_tokens(torch.tensor(float(IN_LOSS)))
    (layer(hidden_SBD)[0] * 0.0).sum().backward()
    return layer.router.weight.grad


def test_the_global_balancing_loss_of_megatron_weakens_with_replicas():
    run_ranks(_check_global_loss, 2)


def _check_global_loss(rank):
    hidden, layout = hidden_MSBD(), Layout(2)
    with cuda_on_cpu():
        groups = start_groups(layout)
        whole = torch.cat(list(hidden), dim=1)  # one micro-batch of both, on one rank
        expected = megatrons_gradient(layout, alone(), whole, "global_aux_loss")
        averaged = megatrons_gradient(layout, groups, hidden[rank], "global_aux_loss")
        dist.all_reduce(averaged, op=dist.ReduceOp.AVG)  # as the data-parallel wrapper does
        torch.testing.assert_close(averaged, expected / 2)

        one = alone()
        expected = sum(ours(layout, one, each) for each in hidden) / 2
        averaged = ours(layout, groups, hidden[rank])
        dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(averaged, expected)


def test_counted_per_token_megatrons_balancing_loss_grows_with_tokens_outside_the_loss():
    run_ranks(_check_per_token_loss, 1)


def _check_per_token_loss(rank):
    """Half of the tokens are in the loss, by whose number Megatron then divides gradients."""
    hidden_SBD, layout = hidden_MSBD()[0], Layout(1)
    in_loss = hidden_SBD[..., 0].numel() // 2
    with cuda_on_cpu():
        groups = start_groups(layout)
        expected = megatrons_gradient(layout, groups, hidden_SBD, "aux_loss")
        counted = megatrons_gradient(
            layout, groups, hidden_SBD, "aux_loss", calculate_per_token_loss=True
        )
        torch.testing.assert_close(counted / in_loss, 2 * expected)

        assert in_loss == IN_LOSS
        expected = ours(layout, groups, hidden_SBD)
        counted = ours(layout, groups, hidden_SBD, calculate_per_token_loss=True)
        torch.testing.assert_close(counted / in_loss, expected)


def test_megatrons_experts_made_on_the_cpu_are_the_same_on_every_rank():
    run_ranks(_check_experts, 2)


def _check_experts(rank):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    layout = Layout(2, ep=2)
    with cuda_on_cpu():
        groups = start_groups(layout)
        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)  # as Megatron seeds every rank
        spec = get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=False)
        layer = spec(config=switch_config(layout), pg_collection=groups)
        assert isinstance(layer, MoELayer)
        theirs = [expert.linear_fc1.weight for expert in layer.experts.local_experts]
        mine = list(build_layer(Case(), layout, groups).experts.weight1)
    assert len(_distinct(theirs)) == E // 2
    assert len(_distinct(mine)) == E


def _distinct(weights):
    """The different ones among the experts of all ranks."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [weight.detach().clone() for weight in weights])
    return {tuple(weight.flatten().tolist()) for weights in everyone for weight in weights}
