"""Dispatch, experts and combine on any grid of ranks equal the undivided layer, with gradients."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.layout_case import (
    FF,
    B,
    D,
    E,
    Layout,
    Part,
    Problem,
    S,
    each_layout,
    start_groups,
    switch_config,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_switch.config import SwitchConfig
from megatron_switch.moe import exchange
from megatron_switch.moe.counter_rng import dropout
from megatron_switch.moe.dispatcher import (
    PackedDispatcher,
    PaddedDispatcher,
    build_dispatcher,
)
from megatron_switch.moe.experts import GroupedExperts
from megatron_switch.moe.routing import RoutedTokens, route
from megatron_switch.testing.ranks import run_ranks

LAYOUTS = [
    Layout(1),
    Layout(2, ep=2),
    Layout(2, tp=2),
    Layout(2, tp=2, etp=2),
    Layout(2, etp=2),
    Layout(2, cp=2),
    Layout(4, tp=2, ep=2),
    Layout(4, tp=2, ep=4),
    Layout(4, cp=2, ep=2),
    Layout(8, tp=2, cp=2, ep=2, etp=2),
]
KINDS = (PackedDispatcher, PaddedDispatcher)
OF_ONE_RANK = Layout(1)


def problems(num_microbatches):
    """Yield what routing can do to a dispatch, by name."""
    draw = Problem.draw
    some = draw(num_microbatches, capacity=3)
    yield "drops", some
    # Ties go to expert 0: the ranks of all others get no token.
    yield "one expert", draw(num_microbatches, capacity=5, router_ED=torch.zeros(E, D).double())
    yield "sequence groups", draw(num_microbatches, capacity=2, by_sequence=True)
    yield "capacity 1", draw(num_microbatches, capacity=1)
    yield "capacity 0", draw(num_microbatches, capacity=0)
    yield "room for all, gated", draw(num_microbatches, capacity=16, gated=True)
    padding_MBS = some.padding_MBS.clone()
    padding_MBS[0] = True
    yield "a micro-batch of padding", replace(some, padding_MBS=padding_MBS)


@each_layout(LAYOUTS)
def test_every_layout_equals_the_undivided_layer(layout):
    num_microbatches = layout.world // (layout.tp * layout.cp)
    cases = [(name, case, case.reference()) for name, case in problems(num_microbatches)]
    run_ranks(_check_layout, layout.world, layout, cases)


def _check_layout(rank, layout, cases):
    part = Part(layout, start_groups(layout))
    config = switch_config(layout)
    for kind in KINDS:
        for chunks, chunk_cases in ((1, cases), (3, cases[:3])):
            dispatcher = kind(config, part.groups, overlap_chunks=chunks)
            for name, problem, expected in chunk_cases:
                try:
                    y_TD = part.check(problem, expected, dispatcher.run)
                except AssertionError as error:
                    raise AssertionError(f"{kind.__name__}, {chunks} chunks, {name}") from error
                # Not merely close to zero: the residual passes a dropped token on as it is.
                dropped_T = part.of(expected["y"]).abs().sum(dim=1) == 0
                assert torch.equal(y_TD.abs().sum(dim=1) == 0, dropped_T)


@pytest.mark.parametrize("kind", KINDS)
def test_dispatched_rows_are_ordered_by_expert_and_carry_gate_and_key(kind):
    run_ranks(_check_dispatched, 2, kind)


def _check_dispatched(rank, kind):
    layout = Layout(2, ep=2)
    part = Part(layout, start_groups(layout))
    problem = Problem.draw(2, capacity=3)
    dispatcher = kind(switch_config(layout), part.groups)
    x_TD = part.of(problem.x_MBSD)
    routed = part.routed(problem, x_TD, problem.router_ED)
    given = []

    def unchanged(rows_RD, tokens_per_expert_e, gate_R, *, key_R):
        given.extend([rows_RD, tokens_per_expert_e, gate_R, key_R])
        return rows_RD, None

    back_TD = dispatcher.run(x_TD, routed, unchanged)
    assert torch.equal(back_TD, x_TD * routed.routing.kept_T.unsqueeze(1))

    rows_RD, tokens_per_expert_e, gate_R, key_R = given
    assert tokens_per_expert_e.device.type == "cpu"
    assert tokens_per_expert_e.sum() == len(rows_RD) == len(gate_R)
    chosen_R = (rows_RD @ problem.router_ED.t()).softmax(dim=1)
    local_R = torch.arange(rank * 2, rank * 2 + 2).repeat_interleave(tokens_per_expert_e)
    filled_R = gate_R > 0
    if kind is PackedDispatcher:
        assert filled_R.all()
        assert len(filled_R) < len(local_R) + 1
    else:
        assert tokens_per_expert_e.tolist() == [2 * 3, 2 * 3]  # peers x capacity
        assert not rows_RD[~filled_R].any()
    assert torch.equal(chosen_R.argmax(dim=1)[filled_R], local_R[filled_R])
    torch.testing.assert_close(gate_R[filled_R], chosen_R.amax(dim=1)[filled_R])
    # A key is the token's index in the whole batch, so it leads back to the token.
    tokens = problem.x_MBSD.flatten(0, 2)[key_R[filled_R]]
    assert torch.equal(tokens, rows_RD[filled_R])


@pytest.mark.parametrize("layout", [Layout(1), Layout(2, tp=2, etp=2), Layout(2, ep=2)], ids=str)
def test_expert_dropout_depends_neither_on_layout_nor_on_mode(layout):
    run_ranks(_check_dropout, layout.world, layout)


def _check_dropout(rank, layout):
    part = Part(layout, start_groups(layout))
    problem = Problem.draw(layout.world // layout.tp, capacity=3)
    x_TD = part.of(problem.x_MBSD)
    routed = part.routed(problem, x_TD, problem.router_ED)
    routing = routed.routing
    hidden_TF = torch.einsum("td,tfd->tf", x_TD, problem.wi_EFD[routing.expert_T]).relu()
    hidden_TF = dropout(hidden_TF, routed.key_T, 0.5)
    y_TD = torch.einsum("tf,tdf->td", hidden_TF, problem.wo_EDF[routing.expert_T])
    y_TD = y_TD * (routing.gate_T * routing.kept_T).unsqueeze(1)

    experts = part.experts(problem, expert_dropout=0.5)
    plain = part.experts(problem)
    for kind in KINDS:
        dispatcher = kind(switch_config(layout), part.groups, overlap_chunks=2)
        torch.testing.assert_close(dispatcher.run(x_TD, routed, experts.train()), y_TD)
        expected_TD = dispatcher.run(x_TD, routed, plain)
        assert torch.equal(dispatcher.run(x_TD, routed, experts.eval()), expected_TD)


def test_half_precision_travels_in_both_modes():
    run_ranks(_check_half_precision, 4)


def _check_half_precision(rank):
    layout = Layout(4, tp=2, ep=2)
    part = Part(layout, start_groups(layout))
    problem = Problem.draw(2, capacity=3)
    x_TD = part.of(problem.x_MBSD).bfloat16().requires_grad_()
    routed = part.routed(problem, x_TD.detach().float(), problem.router_ED.float())
    experts = part.experts(problem).bfloat16()
    assert routed.routing.gate_T.dtype == torch.float32
    results = []
    for kind in KINDS:
        y_TD = kind(switch_config(layout), part.groups).run(x_TD, routed, experts)
        assert y_TD.dtype == torch.bfloat16
        results.append([y_TD, *torch.autograd.grad(y_TD.sum(), [x_TD, *experts.parameters()])])
    for packed, padded in zip(*results, strict=True):
        torch.testing.assert_close(packed, padded)


def test_slots_counted_over_other_micro_batches_travel_as_well():
    run_ranks(_check_late_slots, 2)


def _check_late_slots(rank):
    layout = Layout(2, ep=2)
    part = Part(layout, start_groups(layout))
    problem = Problem.draw(2, capacity=16)
    dispatcher = PackedDispatcher(switch_config(layout), part.groups, overlap_chunks=2)
    x_TD = part.of(problem.x_MBSD)
    routed = part.routed(problem, x_TD, problem.router_ED)
    experts = part.experts(problem)
    expected_TD = dispatcher.run(x_TD, routed, experts)
    # As if the capacity group were the expert-parallel group and others had come first.
    later = replace(routed.routing, slot_T=routed.routing.slot_T + 1000)
    late = replace(routed, routing=later, capacity=2000)
    torch.testing.assert_close(dispatcher.run(x_TD, late, experts), expected_TD)


@pytest.mark.parametrize(
    ("kind", "forward"), [(PackedDispatcher, ["counts"]), (PaddedDispatcher, [])]
)
def test_one_exchange_each_way_per_direction(kind, forward):
    run_ranks(_check_exchanges, 2, kind, forward)


def _check_exchanges(rank, kind, forward):
    layout = Layout(2, ep=2)
    part = Part(layout, start_groups(layout))
    problem = Problem.draw(2, capacity=3)
    x_TD = part.of(problem.x_MBSD).clone().requires_grad_()
    router_ED = problem.router_ED.clone().requires_grad_()
    experts = part.experts(problem)
    sent = _record_exchanges()

    def run(chunks, **settings):
        dispatcher = kind(switch_config(layout), part.groups, overlap_chunks=chunks, **settings)
        sent.clear()

        def noting_experts(*args, **kwargs):
            sent.append("experts")
            return experts(*args, **kwargs)

        routed = part.routed(problem, x_TD, router_ED)
        y_TD = dispatcher.run(x_TD, routed, noting_experts)
        seen = list(sent)
        sent.clear()
        y_TD.sum().backward()
        return seen, list(sent)

    one, two = ["tokens", "gates"], ["tokens", "gates"] * 2
    assert run(1, send_keys=False) == (
        [*forward, *one, "experts", "tokens"],
        ["tokens", *one[::-1]],
    )
    seen, _ = run(1)
    assert seen == [*forward, *one, "keys", "experts", "tokens"]
    # The second chunk is sent before the experts work on the first, in backward too.
    seen, seen_backward = run(2, send_keys=False)
    assert seen == [*forward, *two, "experts", "tokens", "experts", "tokens"]
    assert seen_backward == ["tokens", "tokens", "gates", "tokens", "gates", "tokens"]


def _record_exchanges():
    """Write down what every all-to-all carries."""
    sent = []
    original = dist.all_to_all_single

    def recorded(output, rows, *args, **kwargs):
        kinds = {torch.int64: "keys" if rows.ndim == 1 else "counts"}
        floats = "tokens" if rows.ndim == 2 else "gates"
        sent.append(kinds.get(rows.dtype, floats))
        return original(output, rows, *args, **kwargs)

    exchange.dist.all_to_all_single = recorded
    return sent


@pytest.mark.parametrize("kind", KINDS)
def test_only_integers_are_kept_for_backward(kind):
    run_ranks(_check_bytes, 2, kind)


def _check_bytes(rank, kind):
    layout = Layout(2, ep=2)
    groups = start_groups(layout)
    num_tokens, width = 512, 64
    x_TD = torch.randn(num_tokens, width, requires_grad=True)
    routing = route(torch.randn(num_tokens, E, requires_grad=True), capacity=num_tokens // E)
    routed = RoutedTokens(
        routing, torch.zeros_like(routing.expert_T), 1, routing.capacity, routing.slot_T
    )
    kept = {}

    def note(tensor):
        assert not tensor.is_floating_point()
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def linear_experts(rows_RD, tokens_per_expert_e, gate_R, *, key_R):
        return rows_RD * 2.0 + gate_R.unsqueeze(1), None  # keeps nothing

    dispatcher = kind(switch_config(layout), groups, overlap_chunks=2)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y_TD = dispatcher.run(x_TD, routed, linear_experts)
    y_TD.sum().backward()
    num_slots = routing.capacity * E
    assert 0 < sum(kept.values()) <= 8 * (2 * num_tokens + 4 * num_slots)


@pytest.mark.slow
def test_padded_dispatch_needs_no_data():
    # In a process of its own: the groups of a world of eight exist only here.
    run_ranks(_check_fake, 1)


def _check_fake(rank):
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    layout = Layout(8, tp=2, ep=4)
    groups = start_groups(layout)
    config = switch_config(layout, params_dtype=torch.float32)
    with FakeTensorMode():
        experts = GroupedExperts(E // layout.ep, config, pg_collection=groups)
        experts.reset_parameters(seed=1, layer_number=1, init_scale=0.1)
        x_TD = torch.randn(B * S, D, requires_grad=True)
        for chunks in (1, 2):
            routing = route(torch.randn(B * S, E, requires_grad=True), capacity=5)
            routed = RoutedTokens(routing, torch.zeros(B * S, dtype=torch.int64), 1, 5)
            dispatcher = PaddedDispatcher(config, groups, overlap_chunks=chunks)
            y_TD = dispatcher.run(x_TD, routed, experts)
            y_TD.sum().backward()
            assert y_TD.shape == x_TD.grad.shape == (B * S, D)
            assert experts.weight1.grad.shape == (1, FF, D)
        given = []

        def unchanged(rows_RD, tokens_per_expert_e, gate_R):
            given.extend([rows_RD, tokens_per_expert_e])
            return rows_RD, None

        PaddedDispatcher(config, groups, send_keys=False).run(x_TD, routed, unchanged)
    rows_RD, tokens_per_expert_e = given
    assert tokens_per_expert_e.tolist() == [4 * 3]  # 4 peers send half of 5 slots, rounded up
    assert rows_RD.shape == (12, D)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def test_settings_choose_the_dispatcher():
    run_ranks(_check_builder, 1)


def _check_builder(rank):
    groups = start_groups(OF_ONE_RANK)
    config = switch_config(OF_ONE_RANK)
    packed = build_dispatcher(config, SwitchConfig(dispatch="packed", overlap_chunks=3), groups)
    assert (type(packed), packed.overlap_chunks) == (PackedDispatcher, 3)
    assert not packed.send_keys  # jitter's keys are the router's own business
    settings = SwitchConfig(dispatch="padded", expert_dropout=0.1)
    padded = build_dispatcher(config, settings, groups)
    assert type(padded) is PaddedDispatcher
    assert padded.send_keys
    with pytest.raises(AssertionError, match="was not resolved"):
        build_dispatcher(config, SwitchConfig(), groups)


def test_experts_with_a_bias_are_refused():
    run_ranks(_check_bias, 1)


def _check_bias(rank):
    dispatcher = PackedDispatcher(switch_config(OF_ONE_RANK), start_groups(OF_ONE_RANK))
    routing = route(torch.randn(3, E), capacity=3)
    routed = RoutedTokens(routing, torch.zeros(3, dtype=torch.int64), 1, 3)
    with pytest.raises(AssertionError, match="experts have no bias"):
        dispatcher.run(torch.randn(3, D), routed, lambda rows_RD, *_: (rows_RD, rows_RD[0]))
