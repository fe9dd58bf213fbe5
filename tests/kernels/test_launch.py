"""A launch does its work on a real device, and nothing under fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_switch.kernels.launch import launch, vector


class Kernel:
    """Stands for a compiled kernel: notes how it was launched."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append((grid, arguments, options))


def test_arguments_and_constants_reach_the_kernel():
    kernel, x = Kernel(), torch.zeros(3)
    launch(kernel, (2, 1), x, None, 7, BLOCK=16)
    assert kernel.launches == [((2, 1), (x, None, 7), {"BLOCK": 16})]


def test_an_empty_grid_is_no_launch():
    kernel = Kernel()
    launch(kernel, (0, 4), torch.zeros(0))
    assert kernel.launches == []


def test_fake_tensors_are_no_launch():
    kernel = Kernel()
    with FakeTensorMode():
        launch(kernel, (1,), torch.empty(4, device="cuda"))
    assert kernel.launches == []


def test_a_vector_is_contiguous_and_of_the_length_promised():
    values = torch.arange(6)[::2]
    assert vector(values, 3).is_contiguous()
    with pytest.raises(AssertionError):
        vector(values, 4)
