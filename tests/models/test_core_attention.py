"""torch's attention kernels against Megatron's own attention: values, gradients, memory."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from support.tiny_gpt import tiny_config

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.errors import ConfigError
from megatron_switch.models import core_attention
from megatron_switch.models.core_attention import TorchDotProductAttention, visible_keys

S, B, H, N = 12, 2, 4, 8
CAUSAL, PADDING, ARBITRARY = (
    AttnMaskType.causal,
    AttnMaskType.padding,
    AttnMaskType.arbitrary,
)
ONE_RANK = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))


@pytest.fixture(autouse=True)
def _emulation():
    """Megatron's attention asks for the current CUDA device and its global buffer."""
    with cuda_on_cpu():
        parallel_state._set_global_memory_buffer()
        get_cuda_rng_tracker().add("model-parallel-rng", 5)
        yield
        get_cuda_rng_tracker().reset()
        parallel_state.destroy_global_memory_buffer()


def build(cls=TorchDotProductAttention, kind=CAUSAL, layer_number=1, **settings):
    config = tiny_config(kv_channels=N, **settings)
    return cls(config, layer_number, kind, "self", pg_collection=ONE_RANK)


def inputs(groups=H, queries=S, keys=S, dtype=torch.float32):
    shapes = [(queries, B, H, N), (keys, B, groups, N), (keys, B, groups, N)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def value_and_gradients(attention, tensors, mask=None, **kwargs):
    output = attention(*tensors, mask, **kwargs)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    for tensor in tensors:
        tensor.grad = None
    (output * weights).sum().backward()  # grad() would not do: Megatron's checkpoint refuses it
    return [output.detach(), *(tensor.grad for tensor in tensors)]


def assert_same(actual, expected, **tolerance):
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("groups", [H, 2, 1])
@pytest.mark.parametrize("kind", [CAUSAL, PADDING])
def test_without_a_mask_it_is_megatron_s_attention(kind, groups):
    settings = {"num_query_groups": groups}
    tensors = inputs(groups)
    assert_same(
        value_and_gradients(build(kind=kind, **settings), tensors),
        value_and_gradients(build(DotProductAttention, kind, **settings), tensors),
    )


@pytest.mark.parametrize("groups", [H, 2])
@pytest.mark.parametrize("kind", [CAUSAL, PADDING, ARBITRARY])
def test_a_given_mask_hides_what_it_hides_in_megatron(kind, groups):
    settings = {"num_query_groups": groups}
    mask = torch.rand(B, 1, S, S) < 0.4
    if kind is CAUSAL:  # Megatron takes a mask instead of causality, here it comes on top
        mask |= torch.ones(S, S, dtype=torch.bool).triu(1)
    mask &= ~torch.eye(S, dtype=torch.bool)
    tensors = inputs(groups)
    assert_same(
        value_and_gradients(build(kind=kind, **settings), tensors, mask),
        value_and_gradients(build(DotProductAttention, kind, **settings), tensors, mask),
    )


@pytest.mark.parametrize("grouping_kernel", [False, True])
def test_heads_are_grouped_by_the_kernel_or_by_repeating(grouping_kernel, monkeypatch):
    monkeypatch.setattr(core_attention, "_kernel_groups_heads", lambda params: grouping_kernel)
    settings = {"num_query_groups": 2}
    tensors = inputs(groups=2)
    assert_same(
        value_and_gradients(build(**settings), tensors),
        value_and_gradients(build(DotProductAttention, **settings), tensors),
    )


def test_a_padding_mask_does_not_lift_causality():
    padding = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    padding[0, ..., -3:] = True
    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    tensors = inputs()
    assert_same(
        value_and_gradients(build(), tensors, padding),
        value_and_gradients(build(), tensors, padding | future),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [H, 2])
def test_half_precision_stays_near_float32(dtype, groups):
    attention = build(num_query_groups=groups)
    tensors = inputs(groups, dtype=dtype)
    single = [x.detach().float().requires_grad_() for x in tensors]
    assert_same(
        [x.float() for x in value_and_gradients(attention, tensors)],
        value_and_gradients(attention, single),
        atol=4 * torch.finfo(dtype).eps,
        rtol=4 * torch.finfo(dtype).eps,
    )


def test_a_given_scale_replaces_the_default():
    config = tiny_config(kv_channels=N)
    tensors = inputs()
    ours, stock = (
        cls(config, 1, CAUSAL, "self", softmax_scale=0.3, pg_collection=ONE_RANK)
        for cls in (TorchDotProductAttention, DotProductAttention)
    )
    assert_same(value_and_gradients(ours, tensors), value_and_gradients(stock, tensors))


def test_query_key_layer_scaling_changes_nothing():
    settings = {"apply_query_key_layer_scaling": True, "layer_number": 3}
    tensors = inputs()
    expected = value_and_gradients(build(), tensors)
    assert_same(value_and_gradients(build(**settings), tensors), expected)
    assert_same(value_and_gradients(build(DotProductAttention, **settings), tensors), expected)


@pytest.mark.parametrize("window", [(3, 0), (0, 0), (20, 0)])
def test_a_sliding_window_is_megatron_s(window):
    tensors = inputs()
    assert_same(
        value_and_gradients(build(window_size=window), tensors),
        value_and_gradients(build(DotProductAttention, window_size=window), tensors),
    )


def test_layers_without_the_window_see_everything():
    settings = {"window_size": (1, 0), "window_attn_skip_freq": 2}
    tensors = inputs()
    full = value_and_gradients(build(), tensors)
    assert_same(value_and_gradients(build(layer_number=2, **settings), tensors), full)
    windowed = value_and_gradients(build(layer_number=1, **settings), tensors)
    assert not torch.allclose(windowed[0], full[0])


@pytest.mark.parametrize("kind", [None, CAUSAL, AttnMaskType.no_mask])
@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize("queries", [1, 2, 5])
def test_with_a_cache_the_queries_are_the_last_tokens(queries, window, kind):
    attention = build(window_size=window)
    query, key, value = inputs()
    full = attention(query, key, value, None)
    last = attention(query[-queries:], key, value, None, attn_mask_type=kind)
    torch.testing.assert_close(last, full[-queries:])


@pytest.mark.parametrize("kind", [CAUSAL, PADDING])
def test_a_bias_is_added_to_the_scaled_scores(kind):
    tensors = [*inputs(), torch.randn(1, H, S, S, requires_grad=True)]

    def plain(query, key, value, bias):
        scores = torch.einsum("sbhn,kbhn->bhsk", query, key) / N**0.5 + bias
        if kind is CAUSAL:
            scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("bhsk,kbhn->sbhn", scores.softmax(-1), value).flatten(2)

    attention = build(kind=kind)
    assert_same(
        value_and_gradients(lambda q, k, v, b, _: attention(q, k, v, None, None, b), tensors),
        value_and_gradients(lambda q, k, v, b, _: plain(q, k, v, b), tensors),
    )


def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients():
    mask = torch.zeros(B, 1, S, S, dtype=torch.bool)
    mask[0, :, 4] = True
    output, *gradients = value_and_gradients(build(kind=PADDING), inputs(), mask)
    assert output[4, 0].eq(0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("groups", [H, 2])
def test_causal_training_keeps_nothing_that_grows_with_the_square(groups):
    long = 256
    kept = []
    attention = build(num_query_groups=groups)
    tensors = inputs(groups, queries=long, keys=long)

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attention(*tensors, None)
    assert kept
    assert max(kept) <= long * B * H * N < long * long


def test_dropout_is_on_in_training_only_and_has_the_right_mean():
    query, key, value = inputs()
    value = torch.ones_like(value)
    attention = build(attention_dropout=0.25)
    outputs = torch.stack([attention(query, key, value, None) for _ in range(200)])
    assert outputs.std() > 0.1
    torch.testing.assert_close(outputs.mean(), torch.tensor(1.0), atol=0.02, rtol=0)
    torch.testing.assert_close(attention.eval()(query, key, value, None), torch.ones(S, B, H * N))


@contextmanager
def unchanged_default_stream(unchanged):
    before = torch.cuda.get_rng_state()
    yield
    assert torch.equal(before, torch.cuda.get_rng_state()) == unchanged


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_from_the_same_stream_as_megatron(sequence_parallel):
    settings = {"attention_dropout": 0.5}
    if sequence_parallel:
        settings |= {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    for cls in (TorchDotProductAttention, DotProductAttention):
        with unchanged_default_stream(not sequence_parallel):
            build(cls, **settings)(*inputs(), None)


def test_recomputation_repeats_the_dropout():
    attention = build(attention_dropout=0.5)
    tensors = inputs()
    states = get_cuda_rng_tracker().get_states()
    states = {name: state.clone() for name, state in states.items()}
    direct = value_and_gradients(attention, tensors)
    get_cuda_rng_tracker().set_states(states)
    recomputed = value_and_gradients(
        lambda *x: checkpoint(lambda *y: attention(*y, None), False, *x[:3]), tensors
    )
    assert_same(recomputed, direct, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"softmax_type": "off-by-one"}, "--softmax-type off-by-one"),
        ({"log_max_attention_logit": True}, "--log-max-attention-logit"),
        ({"qk_clip": True}, "--qk-clip"),
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(settings, message):
    with pytest.raises(ConfigError, match=f"no equivalent of {message}.*transformer_engine"):
        build(**settings)


def test_packed_sequences_are_refused():
    with pytest.raises(
        ConfigError, match=r"Sequences packed .*--dataloader-inter-document-masking"
    ):
        build()(*inputs(), None, packed_seq_params=object())


def test_visible_keys_is_none_where_nothing_is_hidden():
    cpu = torch.device("cpu")
    free = {"window": None, "attention_mask": None, "device": cpu}
    assert visible_keys(3, 5, causal=False, **free) is None
    assert visible_keys(1, 5, causal=True, **free) is None
    expected = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    assert torch.equal(visible_keys(2, 4, causal=True, **free), expected)
