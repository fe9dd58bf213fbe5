"""Laws of a layer over several ranks, tried on random batches in which ranks differ.

Each rank has its own micro-batch of some sequences, which share slots or have their own, and some
of the experts. Sequences may be of different lengths, and empty; all tokens may want one expert, so
that the ranks of all others get none; everything a rank holds may be padding, so that it keeps no
token. Packed dispatch serves all of them, padded dispatch those of equal shape. Nobody may wait for
ever: ranks that do are ended after a time, and fail.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.layout_case import D, Layout, start_groups
from support.switch_case import Case, Oracle, build_layer

from megatron_switch.moe.reference import switch_layer
from megatron_switch.testing.ranks import run_ranks

NO_LOSSES = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}


@dataclass(frozen=True)
class Batch:
    """What every rank holds."""

    lengths: tuple[int, ...]
    """Positions of each rank's sequences."""
    padding: tuple[float, ...]
    """Share of them that is padding."""
    capacity: int
    skewed: bool = False
    """Whether all tokens choose expert 0."""
    seed: int = 0
    sequences: int = 1
    by_sequence: bool = False
    """Whether each of them is a capacity group."""

    @property
    def world(self):
        return len(self.lengths)

    def case(self):
        group = "sequence" if self.by_sequence else "microbatch"
        return Case({"capacity": self.capacity, "capacity_group": group}, NO_LOSSES)

    def tokens(self, rank):
        """Return a rank's input, the gradient of its output, and its padding mask."""
        random = torch.Generator().manual_seed(self.seed * 10 + rank)
        num_tokens = self.sequences * self.lengths[rank]
        x_TD = torch.randn(num_tokens, D, generator=random, dtype=torch.float64)
        grad_TD = torch.randn(num_tokens, D, generator=random, dtype=torch.float64)
        padding_T = torch.rand(num_tokens, generator=random) < self.padding[rank]
        if self.skewed:
            x_TD += 20.0 * Oracle(self.case(), 1).weights["router"][0]
        return x_TD, grad_TD, padding_T

    def group_T(self, rank):
        """Return the capacity group of each of a rank's tokens."""
        sequence_T = torch.arange(self.sequences).repeat_interleave(self.lengths[rank])
        return sequence_T if self.by_sequence else torch.zeros_like(sequence_T)

    def reference(self):
        """Return each rank's output and gradient, and the weights' gradients over all ranks."""
        weights = Oracle(self.case(), 1).weights
        leaves = [weights[name].clone().requires_grad_() for name in ("router", "wi", "wo")]
        outputs, gradients = [], []
        for rank in range(self.world):
            x_TD, grad_TD, padding_T = self.tokens(rank)
            x_TD.requires_grad_()
            y_TD = switch_layer(
                x_TD,
                *leaves,
                capacity=self.capacity,
                group_T=self.group_T(rank),
                padding_T=padding_T,
            )
            y_TD.backward(grad_TD)
            outputs.append(y_TD.detach())
            gradients.append(x_TD.grad)
        zeros = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return outputs, gradients, zeros


def batches(lengths):
    """Draw batches of two ranks."""
    share = st.sampled_from([0.0, 0.3, 1.0])
    return st.builds(
        Batch,
        lengths=lengths,
        padding=st.tuples(share, share),
        capacity=st.integers(1, 12),
        skewed=st.booleans(),
        seed=st.integers(0, 1000),
        sequences=st.integers(1, 3),
        by_sequence=st.booleans(),
    )


uneven = batches(st.tuples(st.integers(0, 8), st.integers(0, 8)))
even = batches(st.integers(0, 8).map(lambda length: (length, length)))


CORNERS = (
    Batch((9, 9), (0.0, 0.0), capacity=2, skewed=True),  # one rank's experts get nothing
    Batch((9, 9), (1.0, 0.0), capacity=3),  # a rank that keeps no token
    Batch((9, 9), (1.0, 1.0), capacity=3),  # nobody keeps one
    Batch((0, 0), (0.0, 0.0), capacity=3),  # nobody has one
    Batch((1, 1), (0.0, 0.0), capacity=1),
)
"""What random batches might miss."""
UNEVEN_CORNERS = (
    *CORNERS,
    Batch((7, 0), (0.0, 0.0), capacity=2),  # a whole rank without tokens
    Batch((0, 5), (0.0, 0.0), capacity=2, skewed=True),
)


def try_batches(rank, strategy, examples, modes):
    """Check random batches on ranks that draw, fail and shrink together."""
    layout = Layout(2, ep=2)
    groups = start_groups(layout)

    def check(batch):
        failure = None
        results = [run_layer(rank, batch, layout, groups, mode) for mode in modes]
        try:
            check_results(rank, batch, results)
        except AssertionError as error:
            failure = error
        failures = torch.tensor(int(failure is not None))
        dist.all_reduce(failures)
        if failures:
            raise failure or AssertionError("it fails on the other rank")

    test = given(batch=strategy)(check)
    for corner in examples:
        test = example(batch=corner)(test)
    settings(max_examples=25, deadline=None, derandomize=True, database=None)(test)()


def run_layer(rank, batch, layout, groups, mode):
    """Return all that one rank computes; every collective is behind it then."""
    x_TD, _, _ = batch.tokens(rank)
    layer = build_layer(batch.case(), layout, groups, mode)
    shape = (batch.sequences, batch.lengths[rank])
    x_BSD, grad_BSD, padding_BS = (rows.unflatten(0, shape) for rows in batch.tokens(rank))
    hidden = x_BSD.transpose(0, 1).clone().requires_grad_()
    y_SBD, _ = layer(hidden, padding_mask=padding_BS)
    y_SBD.backward(grad_BSD.transpose(0, 1))
    dist.all_reduce(layer.router.weight.grad)
    # Experts that change nothing: kept tokens come back as they were.
    routed, _ = layer.router(x_BSD, padding_BS)
    back_TD = layer.token_dispatcher.run(x_TD, routed, lambda rows_RD, *_: (rows_RD, None))
    return {
        "y": y_SBD.detach().transpose(0, 1).flatten(0, 1),
        "x": hidden.grad.transpose(0, 1).flatten(0, 1),
        "router": layer.router.weight.grad,
        "wi": layer.experts.weight1.grad,
        "wo": layer.experts.weight2.grad,
        "kept": routed.routing.kept_T,
        "back": back_TD,
    }


def check_results(rank, batch, results):
    outputs, gradients, (router, wi, wo) = batch.reference()
    x_TD, _, padding_T = batch.tokens(rank)
    expected = {
        "y": outputs[rank],
        "x": gradients[rank],
        "router": router,
        # Experts that nobody chose have gradients of zero, not none: ranks' moments agree.
        "wi": wi.chunk(batch.world)[rank],
        "wo": wo.chunk(batch.world)[rank],
    }
    for result in results:
        for name, value in expected.items():
            torch.testing.assert_close(
                result[name], value, msg=lambda text, name=name: f"{name}: {text}"
            )
        kept_T = result["kept"]
        assert torch.equal(result["back"][kept_T], x_TD[kept_T])
        assert not result["back"][~kept_T].any()
        assert not result["y"][~kept_T].any()
        assert not kept_T[padding_T].any()
        assert torch.equal(kept_T, results[0]["kept"])


@pytest.mark.slow
def test_packed_dispatch_serves_ranks_that_differ():
    run_ranks(try_batches, 2, uneven, UNEVEN_CORNERS, ["packed"])


@pytest.mark.slow
def test_packed_and_padded_dispatch_are_the_same():
    run_ranks(try_batches, 2, even, CORNERS, ["packed", "padded"])


def test_four_ranks_of_which_two_are_idle():
    """The first holds no token, the second nothing but padding, and all want one expert."""
    run_ranks(_check_four, 4)


def _check_four(rank):
    batch = Batch((0, 6, 9, 4), (0.0, 1.0, 0.3, 0.0), capacity=3, skewed=True)
    layout = Layout(4, ep=4)
    result = run_layer(rank, batch, layout, start_groups(layout), "packed")
    check_results(rank, batch, [result])
