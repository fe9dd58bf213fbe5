"""An upcycled model begins as the dense one: copies bit for bit, or the same function."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.checkpoint.convert.upcycling import Upcycling, upcycle
from megatron_switch.checkpoint.formats.dist_writer import TensorChunk
from megatron_switch.checkpoint.formats.tensor_source import Region
from megatron_switch.errors import CheckpointError
from megatron_switch.moe.reference import switch_layer

WIDTH, HIDDEN, E = 6, 10, 4
NORM = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
FC1, FC2 = (f"decoder.layers.1.mlp.linear_fc{n}.weight" for n in (1, 2))
MODEL = Architecture(
    decoder=Stack(2, (1,)),
    hidden_size=WIDTH,
    num_attention_heads=1,
    ffn_hidden_size=HIDDEN,
    num_experts=E,
    activation_func="relu",
)
HOW = Upcycling(model=MODEL)
ACTIVATIONS = {"relu": "relu", "gated": "silu", "other": "gelu"}


def with_model(**changes):
    return replace(HOW, model=replace(MODEL, **changes))


def dense(gated=False, dtype=torch.float32):
    rows = 2 * HIDDEN if gated else HIDDEN
    shapes = {
        "embedding.word_embeddings.weight": (8, WIDTH),
        "decoder.layers.0.mlp.linear_fc1.weight": (rows, WIDTH),
        NORM: (WIDTH,),
        FC1: (rows, WIDTH),
        FC2: (WIDTH, HIDDEN),
    }
    tensors = {key: torch.randn(shape).to(dtype) for key, shape in shapes.items()}
    return tensors, [
        TensorChunk(key, tuple(t.shape), t.dtype, Region.whole(t.shape), lambda t=t: t)
        for key, t in tensors.items()
    ]


def made(chunks):
    """Put the chunks of a model together."""
    tensors = {c.key: torch.full(c.shape, float("nan"), dtype=c.dtype) for c in chunks}
    for chunk in chunks:
        tensors[chunk.key][chunk.region.slices_in(Region.whole(chunk.shape))] = chunk.make()
    return tensors


STACK1, STACK2 = (f"decoder.layers.1.mlp.experts.experts.linear_fc{n}.weight" for n in (1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_copies_are_equal_bit_by_bit(dtype):
    before, chunks = dense(dtype=dtype)
    after = made(upcycle(chunks, HOW))
    assert after.keys() == {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.router.weight",
        STACK1,
        STACK2,
    }
    for expert in range(E):
        assert torch.equal(after[STACK1][expert], before[FC1])
        assert torch.equal(after[STACK2][expert], before[FC2])
    assert torch.equal(after["decoder.layers.1.pre_mlp_layernorm.weight"], before[NORM])
    for key in ("embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight"):
        assert torch.equal(after[key], before[key])
    router = after["decoder.layers.1.mlp.router.weight"]
    assert router.dtype == dtype
    assert router.float().std() > 0


@pytest.mark.parametrize("unit", ["relu", "gated", "other"])
def test_the_scale_undoes_the_gate_of_a_uniform_router(unit):
    """Zero router, every token to expert 0 with gate 1/E, no token dropped: the dense function."""
    changes = {"gated_linear_unit": unit == "gated", "activation_func": ACTIVATIONS[unit]}
    how = replace(with_model(**changes), scale="sqrt_e", router_scale=0.0)
    before, chunks = dense(gated=unit == "gated")
    after = made(upcycle(chunks, how))
    x_TD = torch.randn(20, WIDTH)

    def mlp(x, first, second):
        hidden = x @ first.T
        if unit == "gated":
            gate, linear = hidden.chunk(2, dim=-1)
            return (F.silu(gate) * linear) @ second.T
        return (F.relu(hidden) if unit == "relu" else F.gelu(hidden)) @ second.T

    gate = torch.softmax(x_TD @ after["decoder.layers.1.mlp.router.weight"].T, dim=-1)[:, :1]
    expected = mlp(x_TD, before[FC1], before[FC2])
    torch.testing.assert_close(gate * mlp(x_TD, after[STACK1][0], after[STACK2][0]), expected)
    if unit == "relu":  # and so says the reference layer
        found = switch_layer(
            x_TD,
            after["decoder.layers.1.mlp.router.weight"],
            after[STACK1],
            after[STACK2],
            capacity=20,
        )
        torch.testing.assert_close(found, expected)


def test_routers_differ_by_layer_and_seed_and_are_a_runs_own():
    _, chunks = dense()
    key = "decoder.layers.1.mlp.router.weight"
    first = made(upcycle(chunks, HOW))[key]
    assert torch.equal(made(upcycle(chunks, HOW))[key], first)
    assert not torch.equal(made(upcycle(chunks, replace(HOW, seed=1)))[key], first)
    # Behind an encoder the same layer has another number.
    assert not torch.equal(made(upcycle(chunks, with_model(encoder=Stack(3))))[key], first)


def test_a_weight_that_leaves_its_type_is_refused():
    _, chunks = dense()
    key = "decoder.layers.1.mlp.linear_fc2.weight"
    large = [
        replace(chunk, dtype=torch.float16, make=lambda c=chunk: torch.full(c.shape, 6e4).half())
        if chunk.key == key
        else chunk
        for chunk in chunks
    ]
    made(upcycle(large, HOW))  # as they are
    with pytest.raises(CheckpointError, match=rf"{key} times .* is more than torch.float16 holds"):
        made(upcycle(large, replace(HOW, scale="sqrt_e")))


@pytest.mark.parametrize(("scale", "dtype"), [(1e300, torch.float32), (1e12, torch.float16)])
def test_a_router_that_its_type_cannot_hold_is_refused(scale, dtype):
    _, chunks = dense(dtype=dtype)
    with pytest.raises(CheckpointError, match=rf"--router-scale .* {dtype} cannot hold"):
        made(upcycle(chunks, replace(HOW, router_scale=scale)))


def test_a_model_with_biases_is_refused():
    _, chunks = dense()
    bias = "decoder.layers.1.mlp.linear_fc2.bias"
    chunks.append(TensorChunk(bias, (6,), torch.float32, Region.whole((6,)), lambda: torch.ones(6)))
    with pytest.raises(CheckpointError, match=rf"has {bias}, but experts have no biases"):
        upcycle(chunks, HOW)


def test_a_sparse_model_is_refused():
    _, chunks = dense()
    with pytest.raises(CheckpointError, match="Layer 1 of the decoder has experts already"):
        upcycle(upcycle(chunks, HOW), HOW)


def test_a_layer_that_is_not_there_is_refused():
    _, chunks = dense()
    how = with_model(decoder=Stack(8, (1, 7)))
    with pytest.raises(CheckpointError, match=r"no MLP in decoder layer 7, which shall get"):
        upcycle(chunks, how)
