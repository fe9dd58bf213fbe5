"""Results that are remembered are those that torch's fake tensors work out."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from megatron_switch.rehearsal.observer import StepObserver
from megatron_switch.rehearsal.shape_cache import ShapeCache

CALLS = {
    "product": lambda x: x @ x.t(),
    "promotion": lambda x: x * torch.ones(4, dtype=torch.float64),
    "scalar": lambda x: x.int() + 1.5,
    "same scalar of another type": lambda x: x.int() + True,
    "in place": lambda x: x.mul_(2).add_(1),
    "view of a view": lambda x: x.view(2, 2, 4)[:, 1].transpose(0, 1),
    "copy of a view": lambda x: x.t().contiguous(),
    "not contiguous": lambda x: x.t() * 2,
    "several results": lambda x: torch.stack(x.sort(dim=0)[0].unbind()),
    "list": lambda x: torch.cat([x, x], dim=1),
    "factory": lambda x: torch.zeros(3, 5, dtype=torch.bfloat16),
    "known value": lambda x: x[int(torch.tensor(2))],
    "attention": lambda x: functional.scaled_dot_product_attention(*[x.view(1, 2, 2, 4)] * 3),
    "shape in place": lambda x: x.clone().t_(),
}


def described(tensor):
    assert isinstance(tensor, FakeTensor)
    storage = tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, storage


@pytest.mark.parametrize("name", CALLS)
def test_each_call_gives_what_torch_gives_however_often(name):
    call = CALLS[name]
    with FakeTensorMode():
        expected = described(call(torch.empty(4, 4)))
    mode = FakeTensorMode()
    with mode, StepObserver(run=ShapeCache(mode).run):
        for _ in range(3):
            assert described(call(torch.empty(4, 4))) == expected


def test_gradients_have_the_shapes_of_their_tensors():
    mode = FakeTensorMode()
    with mode, StepObserver(run=ShapeCache(mode).run):
        for _ in range(2):
            layer = torch.nn.Linear(4, 3)
            functional.gelu(layer(torch.empty(5, 4))).sum().backward()
            assert layer.weight.grad.shape == (3, 4)
            assert layer.bias.grad.shape == (3,)


def test_every_new_result_has_memory_of_its_own_and_views_have_their_bases():
    mode = FakeTensorMode()
    with mode, StepObserver(run=ShapeCache(mode).run):
        x = torch.empty(4, 4)
        results = [x + 1 for _ in range(3)]
        assert len({each.untyped_storage()._cdata for each in results}) == 3
        views = [x.view(16) for _ in range(3)]
        assert {v.untyped_storage()._cdata for v in views} == {x.untyped_storage()._cdata}
        for _ in range(2):
            assert x.add_(1) is x


def test_what_torch_refuses_is_refused():
    mode = FakeTensorMode()
    with mode, StepObserver(run=ShapeCache(mode).run), pytest.raises(RuntimeError):
        torch.empty(4, 4) @ torch.empty(3, 3)
