"""The reference layer does what the paper says, in cases small enough to write out."""

import pytest
import torch

from megatron_switch.moe.reference import switch_layer


def weights(num_experts, width, hidden):
    torch.manual_seed(3)
    return (
        torch.randn(num_experts, width, dtype=torch.float64),
        torch.randn(num_experts, hidden, width, dtype=torch.float64),
        torch.randn(num_experts, width, hidden, dtype=torch.float64),
    )


def test_one_expert_is_a_dense_layer():
    router_ED, wi_EFD, wo_EDF = weights(1, 4, 6)
    x_TD = torch.randn(5, 4, dtype=torch.float64)
    expected_TD = torch.relu(x_TD @ wi_EFD[0].T) @ wo_EDF[0].T
    torch.testing.assert_close(
        switch_layer(x_TD, router_ED, wi_EFD, wo_EDF, capacity=5), expected_TD
    )


def test_gate_expert_and_capacity():
    _, wi_EFD, wo_EDF = weights(2, 2, 6)
    router_ED = torch.eye(2, dtype=torch.float64)
    x_TD = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    y_TD = switch_layer(x_TD, router_ED, wi_EFD, wo_EDF, capacity=2, activation=torch.tanh)
    for token, expert in ((0, 0), (1, 1), (2, 0)):
        gate = x_TD[token].softmax(0)[expert]
        expected_D = gate * (wo_EDF[expert] @ torch.tanh(wi_EFD[expert] @ x_TD[token]))
        torch.testing.assert_close(y_TD[token], expected_D)
    assert not y_TD[3].any()  # a tie goes to expert 0, which is full


def test_padding_takes_no_capacity_and_groups_count_apart():
    router_ED, wi_EFD, wo_EDF = weights(1, 3, 4)
    x_TD = torch.randn(6, 3, dtype=torch.float64).abs()
    y_TD = switch_layer(
        x_TD,
        router_ED,
        wi_EFD,
        wo_EDF,
        capacity=1,
        activation=lambda hidden: hidden,
        group_T=torch.tensor([0, 0, 0, 1, 1, 1]),
        padding_T=torch.tensor([True, False, False, False, False, True]),
    )
    assert y_TD.ne(0).all(dim=1).tolist() == [False, True, False, True, False, False]


def test_dropped_tokens_have_zero_gradients_not_none():
    tensors = [t.requires_grad_() for t in weights(2, 3, 4)]
    x_TD = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    switch_layer(x_TD, *tensors, capacity=0).sum().backward()
    assert all(not tensor.grad.any() for tensor in (x_TD, *tensors))


def test_gradients_match_finite_differences():
    tensors = [t.requires_grad_() for t in weights(3, 3, 4)]
    x_TD = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def layer(*inputs):
        return switch_layer(*inputs, capacity=2, activation=torch.tanh)

    assert torch.autograd.gradcheck(layer, (x_TD, *tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_output_has_the_dtype_of_the_input(dtype):
    router_ED, wi_EFD, wo_EDF = (tensor.to(dtype) for tensor in weights(2, 3, 4))
    x_TD = torch.randn(5, 3).to(dtype)
    assert switch_layer(x_TD, router_ED, wi_EFD, wo_EDF, capacity=2).dtype == dtype
    assert switch_layer(x_TD[:0], router_ED, wi_EFD, wo_EDF, capacity=2).shape == (0, 3)
