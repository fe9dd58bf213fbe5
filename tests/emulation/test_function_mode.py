"""Calls that name a CUDA device end on the CPU, and draws come from the right random stream."""

import copy
import io

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.emulation.function_mode import is_cuda

SEED = 4321


@pytest.fixture
def _emulation():
    with cuda_on_cpu():
        torch.manual_seed(SEED)
        yield


def both_states():
    return torch.get_rng_state(), torch.cuda.get_rng_state()


def drawn_from(draw):
    """Names of the random streams that ``draw()`` moves on."""
    host, cuda = both_states()
    draw()
    host_after, cuda_after = both_states()
    moved = {"host": not torch.equal(host, host_after), "cuda": not torch.equal(cuda, cuda_after)}
    return {name for name, has_moved in moved.items() if has_moved}


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda", True),
        ("cuda:3", True),
        (0, True),
        (torch.device("cuda", 1), True),
        ("cpu", False),
        ("meta", False),
        (torch.device("cpu"), False),
        (None, False),
    ],
)
def test_is_cuda_knows_every_way_to_name_a_device(device, expected):
    assert is_cuda(device) is expected


@pytest.mark.usefixtures("_emulation")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, device="cuda"),
        lambda: torch.zeros(2, device=torch.cuda.current_device()),
        lambda: torch.ones(2).cuda(),
        lambda: torch.ones(2).cuda(0, non_blocking=True),
        lambda: torch.ones(2).to("cuda:1"),
        lambda: torch.ones(2).to(torch.device("cuda"), torch.bfloat16),
        lambda: torch.ones(2).to(device="cuda"),
        lambda: torch.ones(2).pin_memory(),
        lambda: torch.empty(2, pin_memory=True),
        lambda: torch.cuda.FloatTensor([1.0]),
        lambda: torch.nn.Linear(2, 2, device="cuda").weight,
        lambda: torch.nn.Linear(2, 2).cuda().weight,
        lambda: torch.ones(2).new_empty(3, device="cuda"),
    ],
)
def test_every_way_to_ask_for_cuda_gives_a_cpu_tensor(make):
    assert make().device == torch.device("cpu")


@pytest.mark.usefixtures("_emulation")
def test_a_default_device_of_cuda_gives_cpu_tensors():
    with torch.device("cuda"):
        assert torch.empty(2).device == torch.device("cpu")


@pytest.mark.usefixtures("_emulation")
def test_types_are_named_as_on_a_gpu():
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert torch.ones(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(2).type(torch.int64).dtype == torch.int64


@pytest.mark.usefixtures("_emulation")
@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.nn.functional.dropout(torch.ones(9, device="cuda"), 0.5),
        lambda: torch.rand(3, device="cuda"),
        lambda: torch.empty(3, device="cuda").normal_(),
        lambda: torch.empty(3).cuda().normal_(),
        lambda: torch.empty(3).to("cuda").normal_(),
        lambda: torch.empty(3).to(device="cuda").normal_(),
        lambda: torch.nn.init.normal_(torch.empty(3, device="cuda")),
        lambda: torch.nn.init.trunc_normal_(torch.empty(3, device="cuda")),
        lambda: torch.bernoulli(torch.full((3,), 0.5, device="cuda")),
        lambda: torch.rand_like(torch.ones(3, device="cuda")),
    ],
)
def test_gpu_draws_leave_the_host_stream_alone(draw):
    assert drawn_from(draw) == {"cuda"}


@pytest.mark.usefixtures("_emulation")
@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(3),
        lambda: torch.randperm(4),
        lambda: torch.randint(5, (2,)),
        lambda: torch.randn(3, device="cpu"),
        lambda: torch.empty((), dtype=torch.int64).random_(),
        lambda: torch.nn.init.normal_(torch.empty(3)),
        lambda: torch.nn.init.trunc_normal_(torch.empty(3)),
        lambda: iter(DataLoader(range(4))),
        lambda: list(DataLoader(range(4), shuffle=True)),
    ],
)
def test_host_draws_leave_the_cuda_stream_alone(draw):
    assert drawn_from(draw) == {"host"}


@pytest.mark.usefixtures("_emulation")
def test_a_generator_that_is_named_is_the_only_one_drawn_from():
    generator = torch.Generator().manual_seed(1)
    assert drawn_from(lambda: torch.rand(3, generator=generator)) == set()
    assert drawn_from(lambda: torch.empty(3).normal_(generator=generator)) == set()


def test_host_draws_are_those_of_a_program_without_the_emulation():
    def program():
        torch.manual_seed(SEED)
        first = torch.rand(3)
        list(DataLoader(range(4), shuffle=True))
        return first, torch.randperm(5), torch.empty(4).uniform_(), torch.initial_seed()

    expected = program()
    with cuda_on_cpu():
        actual = program()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_the_host_stream_goes_on_through_the_block():
    torch.manual_seed(SEED)
    expected = torch.rand(3)
    after = torch.rand(3)

    torch.manual_seed(SEED)
    with cuda_on_cpu():
        torch.rand(7, device="cuda")
        torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    torch.testing.assert_close(torch.rand(3), after, rtol=0, atol=0)


@pytest.mark.usefixtures("_emulation")
def test_seeding_reaches_both_streams_as_torch_does():
    torch.manual_seed(5)
    assert torch.equal(*both_states())  # both kernels are the CPU's, so equal seeds are equal
    torch.cuda.manual_seed(6)
    assert torch.initial_seed() == 5
    assert torch.cuda.initial_seed() == 6


@pytest.mark.usefixtures("_emulation")
def test_states_of_the_cuda_stream_can_be_saved_and_restored():
    state = torch.cuda.get_rng_state()
    host, expected = torch.get_rng_state(), torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    torch.testing.assert_close(torch.rand(3, device="cuda"), expected, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), host)


@pytest.mark.usefixtures("_emulation")
def test_forking_the_streams_restores_both():
    before = both_states()
    with torch.random.fork_rng():
        torch.rand(3)
        torch.rand(3, device="cuda")
    for state, restored in zip(before, both_states(), strict=True):
        assert torch.equal(state, restored)


@pytest.mark.usefixtures("_emulation")
@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_recompute_draws_the_same_dropout_again(reentrant):
    x = torch.ones(64, device="cuda", requires_grad=True)
    y = checkpoint(torch.nn.functional.dropout, x, 0.5, use_reentrant=reentrant)
    torch.rand(3, device="cuda")  # what comes between forward and backward
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach(), rtol=0, atol=0)


@pytest.mark.usefixtures("_emulation")
@pytest.mark.parametrize("backward", ["tensor", "autograd", "grad"])
def test_backward_finds_the_emulated_device(backward):
    class AsksForCuda(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.full((1,), 2.0, device="cuda")

    x = torch.ones(2, requires_grad=True)
    y = AsksForCuda.apply(x).sum()
    if backward == "tensor":
        y.backward()
    elif backward == "autograd":
        torch.autograd.backward(y)
    else:
        (x.grad,) = torch.autograd.grad(y, x)
    assert x.grad.tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("_emulation")
def test_tensors_carry_no_mark_of_the_emulation():
    tensor = torch.tensor([1.0, 2.0])
    assert vars(tensor) == {}
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), tensor)
    assert torch.equal(copy.deepcopy(tensor), tensor)
