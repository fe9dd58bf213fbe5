"""Counter-based noise: its bits, its statistics, and that it belongs to tokens and not to ranks."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megatron_switch.errors import ConfigError
from megatron_switch.moe.counter_rng import dropout, jitter, mix, token_keys, uniform

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


def splitmix64(state):
    """SplitMix64's output function on Python's own integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def keys(count, step_key=1):
    return token_keys(step_key, 3, torch.arange(count))


def test_splitmix64_gives_its_published_numbers():
    # The first outputs for seed 1234567, as in the reference implementation's test vectors.
    outputs = [splitmix64((1234567 + k * STEP) & MASK) for k in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("parts", [(0,), (5, -1), (2**63 + 11, 7, 123456789), (-(2**63),)])
def test_mix_is_a_chain_of_splitmix64(parts):
    expected = 0
    for part in parts:
        expected = splitmix64((expected + part + STEP) & MASK)
    assert mix(*parts).item() & MASK == expected
    assert mix(*parts).dtype == torch.int64


def test_integers_and_tensors_mix_alike():
    as_tensors = mix(torch.tensor(4), torch.arange(3).int(), torch.tensor([[7], [8]]))
    assert as_tensors.shape == (2, 3)
    assert as_tensors[1, 2] == mix(4, 2, 8)
    assert token_keys(int(mix(1, 2)), 5, torch.arange(3))[2] == mix(mix(1, 2), 5, 2)


def test_keys_do_not_collide():
    parts = torch.cartesian_prod(torch.arange(20), torch.arange(20), torch.arange(500))
    assert mix(*parts.unbind(1)).unique().numel() == len(parts)


def test_uniform_takes_the_top_bits_of_the_stream_that_a_key_seeds():
    key_T = mix(torch.arange(4))
    actual = uniform(key_T, 3, first_column=2)
    assert actual.dtype == torch.float32
    for key, row in zip(key_T.tolist(), actual.tolist(), strict=True):
        expected = [
            (splitmix64((key + (column + 1) * STEP) & MASK) >> 40) / 2**24 for column in (2, 3, 4)
        ]
        assert row == expected


def test_uniform_is_uniform():
    """Mean, variance and a chi-square over 256 buckets; keys are fixed, so this never flickers."""
    values = uniform(keys(4000), 64).double()
    count = values.numel()
    assert 0.0 <= values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1.0
    assert values.mean().item() == pytest.approx(0.5, abs=4 * (1 / 12 / count) ** 0.5)
    assert values.var().item() == pytest.approx(1 / 12, abs=4 * (1 / 180 / count) ** 0.5)

    buckets = (values * 256).long().flatten().bincount(minlength=256).double()
    chi_square = ((buckets - count / 256).square() / (count / 256)).sum().item()
    assert abs(chi_square - 255) < 4 * (2 * 255) ** 0.5
    low_bits = (values * 2**24).long() % 16
    buckets = low_bits.flatten().bincount(minlength=16).double()
    assert ((buckets - count / 16).square() / (count / 16)).sum() < 15 + 4 * 30**0.5


def test_rows_and_columns_are_uncorrelated():
    """Largest of all pairwise correlations stays within five standard errors."""
    values = uniform(keys(4000), 64).double()
    for samples in (values, uniform(keys(64), 4000).double().T):
        correlation = torch.corrcoef(samples.T) - torch.eye(64, dtype=torch.float64)
        assert correlation.abs().max() < 5 / 4000**0.5
    neighbours = torch.corrcoef(torch.stack([values[1:].flatten(), values[:-1].flatten()]))
    assert abs(neighbours[0, 1]) < 5 / values.numel() ** 0.5


def test_steps_layers_and_purposes_are_independent():
    streams = [
        uniform(token_keys(step, layer, torch.arange(500)), 64).flatten()
        for step in (1, 2)
        for layer in (0, 1)
    ]
    # The same tokens' jitter and dropout noise, recovered from what they do to ones.
    ones = torch.ones(500, 64)
    streams += [jitter(ones, keys(500), 0.5), dropout(ones, keys(500), 0.5)]
    correlation = torch.corrcoef(torch.stack([stream.flatten().double() for stream in streams]))
    assert (correlation - torch.eye(6, dtype=torch.float64)).abs().max() < 5 / 32_000**0.5


def test_noise_belongs_to_the_token_wherever_its_row_and_column_are():
    key_T = keys(11)
    whole = uniform(key_T, 8)
    permutation = torch.randperm(11)
    assert torch.equal(uniform(key_T[permutation], 8), whole[permutation])
    parts = [uniform(key_T[:4], 3), uniform(key_T[:4], 5, first_column=3)]
    assert torch.equal(torch.cat(parts, dim=1), whole[:4])

    x_RF = torch.randn(11, 8)
    halves = [dropout(x_RF[:, :4], key_T, 0.3), dropout(x_RF[:, 4:], key_T, 0.3, first_column=4)]
    assert torch.equal(torch.cat(halves, dim=1), dropout(x_RF, key_T, 0.3))


def test_blocks_leave_no_seam(monkeypatch):
    whole = uniform(keys(10), 6)
    monkeypatch.setattr("megatron_switch.moe.counter_rng._BLOCK_ELEMENTS", 13)
    assert torch.equal(uniform(keys(10), 6), whole)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_no_rows_or_columns(shape):
    assert uniform(keys(shape[0]), shape[1]).shape == shape
    assert jitter(torch.ones(shape), keys(shape[0]), 0.1).shape == shape
    assert dropout(torch.ones(shape), keys(shape[0]), 0.1).shape == shape


def test_jitter_is_uniform_around_one():
    noise = jitter(torch.ones(2000, 64), keys(2000), 0.01).double()
    assert noise.min() >= 0.99 - 1e-7
    assert noise.max() <= 1.01 + 1e-7
    assert noise.mean().item() == pytest.approx(1.0, abs=1e-4)
    assert noise.std().item() == pytest.approx(0.02 / 12**0.5, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_the_mean(dtype):
    result = dropout(torch.ones(2000, 64, dtype=dtype), keys(2000), 0.25)
    assert result.dtype == dtype
    assert result.unique().tolist() == pytest.approx([0.0, 4 / 3], rel=1e-2)
    assert (result == 0).double().mean().item() == pytest.approx(0.25, abs=0.005)


def test_zero_noise_returns_the_input_itself():
    x_TD = torch.randn(3, 4)
    assert jitter(x_TD, keys(3), 0.0) is x_TD
    assert dropout(x_TD, keys(3), 0.0) is x_TD


@pytest.mark.parametrize(
    "noisy",
    [
        lambda x_TD: jitter(x_TD, keys(5), 0.3),
        lambda x_TD: dropout(x_TD, keys(5), 0.4, first_column=2),
    ],
    ids=["jitter", "dropout"],
)
def test_backward_draws_the_same_noise_and_keeps_only_keys(noisy):
    x_TD = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(noisy, x_TD)
    assert torch.autograd.gradgradcheck(noisy, x_TD)

    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        noisy(x_TD)
    assert [(tensor.dtype, tuple(tensor.shape)) for tensor in saved] == [(torch.int64, (5,))]


def test_no_value_is_read_by_the_host():
    with FakeTensorMode():
        key_T = token_keys(mix(1, 2), 3, torch.arange(6))
        x_TD = torch.randn(6, 4, requires_grad=True)
        dropout(jitter(x_TD, key_T, 0.1), key_T, 0.1).sum().backward()
        assert x_TD.grad.shape == (6, 4)


@pytest.mark.parametrize("eps", [-0.1, 1.0, float("nan")])
def test_jitter_out_of_range_names_the_flag(eps):
    with pytest.raises(ConfigError, match=rf"--moe-input-jitter-eps {eps}\. Switch uses 0\.01"):
        jitter(torch.ones(1, 1), keys(1), eps)


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_dropout_out_of_range_names_the_flag(p):
    with pytest.raises(ConfigError, match=rf"below 1, got --switch-expert-dropout {p}"):
        dropout(torch.ones(1, 1), keys(1), p)
