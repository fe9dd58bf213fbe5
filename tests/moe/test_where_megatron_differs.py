"""What Megatron-Core 0.19.2 computes otherwise than it says, or than in another layout.

Each test shows Megatron's own number first, so that it fails when a later Megatron is right, and
then ours. The same promises are kept for whole models by ``megatron-switch check-layouts``.
"""

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.router import TopKRouter
from support.layout_case import D, E, Layout, S, start_groups, switch_config
from support.switch_case import Case, build_layer

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.moe.micro_batch_state import set_loss_tokens
from megatron_switch.moe.routing import route
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


def megatrons_router(layout, groups, **changes):
    """Megatron's router, with weights that are the same in every layout."""
    router = TopKRouter(switch_config(layout, **changes), pg_collection=groups)
    router.layer_number = 1
    weight = torch.randn(E, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    router.weight.data.copy_(weight)
    return router


def megatrons_gradient(layout, groups, hidden_SBD, kind, **changes):
    """The balancing loss's gradient of Megatron's router, on this rank."""
    losses = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 1.0}
    router = megatrons_router(layout, groups, **losses, **changes)
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


def test_the_position_policy_of_megatron_keeps_other_tokens_than_the_first():
    """It takes the largest of zeros and ones, where equal ones have no order."""
    num_tokens, num_experts, capacity = 4096, 8, 256
    expert_T = torch.randint(num_experts, (num_tokens,), generator=torch.Generator().manual_seed(3))
    map_TE = torch.nn.functional.one_hot(expert_T, num_experts).bool()
    first_TE = map_TE & (map_TE.cumsum(dim=0) <= capacity)
    _, theirs_TE = apply_router_token_dropping(
        map_TE.float(), map_TE, 1, capacity * num_experts / num_tokens, drop_policy="position"
    )
    assert torch.equal(theirs_TE.sum(dim=0), first_TE.sum(dim=0))  # as many, and not the same
    assert (theirs_TE != first_TE).any(dim=0).all()
    ours_T = route(map_TE.float(), capacity=capacity).kept_T
    assert torch.equal(ours_T, first_TE.any(dim=1))


def test_padding_takes_slots_of_megatrons_experts():
    run_ranks(_check_padding, 1)


def _check_padding(rank):
    """All tokens want one expert, which has room for half of them; the padding is louder."""
    layout = Layout(1)
    padding_BS = torch.arange(S).expand(2, S) < S // 2
    hidden_SBD = torch.ones(S, 2, D, dtype=torch.float64)
    hidden_SBD[: S // 2] *= 2.0
    toward_one = torch.zeros(E, D, dtype=torch.float64)
    toward_one[1] = 1.0
    with cuda_on_cpu():
        groups = start_groups(layout)
        factor = {"moe_expert_capacity_factor": 0.5 * E}
        router = megatrons_router(layout, groups, **factor)
        router.weight.data.copy_(toward_one)
        _, map_TE = router(hidden_SBD, padding_BS.t().contiguous())
        kept_SB = map_TE.any(dim=1).view(S, 2)
        assert torch.equal(kept_SB.bool(), padding_BS.t())

        layer = build_layer(Case(config=factor), layout, groups)
        layer.router.weight.data.copy_(toward_one)
        routed, _ = layer.router(hidden_SBD.transpose(0, 1).contiguous(), padding_BS)
    assert torch.equal(routed.routing.kept_T.view(2, S), ~padding_BS)


def test_what_megatron_drops_depends_on_tensor_parallelism():
    run_ranks(_check_drops, 2)


def _check_drops(rank):
    """It counts capacity over the tokens of a rank; that ours does not, test_switch_mlp shows."""
    layout = Layout(2, tp=2)
    hidden_SBD = hidden_MSBD()[0]
    factor = {"moe_expert_capacity_factor": 0.75}
    with cuda_on_cpu():
        groups = start_groups(layout)
        _, whole_TE = megatrons_router(Layout(1), alone(), **factor)(hidden_SBD)
        mine_SBD = hidden_SBD.chunk(2)[rank].contiguous()
        _, part_TE = megatrons_router(layout, groups, **factor)(mine_SBD)
    differs = (part_TE != whole_TE.chunk(2)[rank]).any().int()
    dist.all_reduce(differs)
    assert differs


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_megatrons_jitter_goes_on_in_evaluation_and_is_biased_in_half_precision(dtype):
    run_ranks(_check_jitter, 1, dtype)


def _check_jitter(rank, dtype):
    layout, jitter = Layout(1), {"moe_input_jitter_eps": 0.01, "params_dtype": dtype}
    hidden_SBD = hidden_MSBD()[0].to(dtype)
    with cuda_on_cpu():
        groups = start_groups(layout)
        router = megatrons_router(layout, groups, **jitter).eval()
        assert not torch.equal(router(hidden_SBD)[0], router(hidden_SBD)[0])
        noise = router.apply_input_jitter(torch.ones(100_000, dtype=dtype))
        is_biased = abs(noise.double().mean() - 1.0) > 1e-3
        assert is_biased == (dtype is torch.bfloat16)

        layer = build_layer(Case(config=jitter), layout, groups).eval()
        assert torch.equal(layer(hidden_SBD)[0], layer(hidden_SBD)[0])


def test_megatrons_second_groups_for_gathers_forget_the_order_of_ranks():
    """Only Megatron-FSDP reads them, which knows no pipeline; with one stage it is one order."""
    run_ranks(_check_gather_groups, 4)


def _check_gather_groups(rank):
    for stages in (2, 1):
        mpu.initialize_model_parallel(
            pipeline_model_parallel_size=stages,
            order="tp-cp-ep-pp-dp",  # --use-tp-pp-dp-mapping
            create_gloo_process_groups=False,
        )
        members, in_order = (
            dist.get_process_group_ranks(group)
            for group in (
                mpu.create_all_gather_groups()[0],
                mpu.get_data_parallel_group(with_context_parallel=True),
            )
        )
        assert (members == in_order) == (stages == 1)
        mpu.destroy_model_parallel()
