"""From flags to a Switch-T5: what it consists of, and how it starts."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import total_parameters
from megatron_switch.config import SwitchConfig
from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.moe.switch_mlp import SwitchMLP
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.training.arguments.defaults import fill_defaults
from megatron_switch.training.arguments.parser import parse_command_line
from megatron_switch.training.loop.global_state import validate
from megatron_switch.training.loop.gpt_builder import model_config, resolve_dispatch
from megatron_switch.training.loop.t5_builder import T5ModelBuilder, gelu_tanh

FLAGS = (
    "--switch-arch t5 --encoder-num-layers 4 --decoder-num-layers 3 --hidden-size 48 "
    "--num-attention-heads 4 --kv-channels 16 --ffn-hidden-size 80 --num-experts 4 "
    "--seq-length 32 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --mock-data --switch-device cpu "
)


def built(flags=""):
    """Return arguments, configuration and model; inside of process groups."""
    line = parse_command_line((FLAGS + flags).split())
    args = line.args
    fill_defaults(line, "cpu")
    validate(args)
    args.padded_vocab_size = 256
    config = model_config(args, resolve_dispatch(args, SwitchConfig.from_args(args), "cpu"))
    assert config.get_builder_cls() is T5ModelBuilder
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return args, config, T5ModelBuilder(config).build_model(groups)


@pytest.mark.parametrize(
    "flags", ["", "--switch-activation gated-gelu --untie-embeddings-and-output-weights"]
)
def test_the_model_is_what_the_flags_and_the_start_up_text_say(flags):
    run_ranks(_check_model, 1, flags)


def _check_model(rank, flags):
    with cuda_on_cpu():
        args, config, model = built(flags)
    gated = "gated" in flags
    for stack, depth in ((config.encoder, 4), (config.transformer, 3)):
        assert stack.num_layers == depth
        assert stack.activation_func is (gelu_tanh if gated else F.relu)
        assert stack.gated_linear_unit == gated
        assert stack.softmax_scale == 1.0
    sparse = [module for module in model.modules() if isinstance(module, SwitchMLP)]
    numbers = tuple(layer.layer_number for layer in sparse)
    described = Architecture.from_args(args)
    assert numbers == described.sparse_layer_numbers == (2, 4, 6)
    assert [isinstance(layer.mlp, SwitchMLP) for layer in model.decoder.layers] == [0, 1, 0]
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == total_parameters(described).total


def test_it_starts_as_t5_does():
    run_ranks(_check_start, 1)


def _check_start(rank):
    with cuda_on_cpu():
        args, _, model = built()
    embedding = model.embedding.word_embeddings.weight
    assert embedding.std().item() == pytest.approx(1.0, abs=0.05)
    assert model.output_layer.weight is None
    assert model.output_layer.bias is None
    channels = args.kv_channels
    layer = model.decoder.layers[0]
    heads = layer.self_attention.linear_qkv.weight.view(-1, 3, channels, args.hidden_size)
    deviations = [heads[:, part].std().item() for part in range(3)]
    # Scores are not scaled: the factor is in the first weights of the queries.
    assert deviations[0] == pytest.approx(deviations[1] / channels**0.5, rel=0.1)
    assert deviations[2] == pytest.approx(deviations[1], rel=0.1)
    cross = layer.cross_attention
    ratio = cross.linear_q.weight.std() / cross.linear_kv.weight.std()
    assert ratio.item() == pytest.approx(channels**-0.5, rel=0.1)


def test_the_tanh_approximation_is_that_of_t5():
    x = torch.linspace(-4, 4, 50, dtype=torch.float64)
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    torch.testing.assert_close(gelu_tanh(x), 0.5 * x * (1 + torch.tanh(inner)))


def test_each_stack_balances_its_experts_without_labels_too():
    run_ranks(_check_balance, 1)


def _check_balance(rank):
    with cuda_on_cpu():
        _, config, model = built("--moe-aux-loss-coeff 0.5")
        source_BS, target_BS = torch.randint(127, (2, 1, 32))
        stacks = ((config.encoder, model.decoder), (config.transformer, model.encoder))
        for silent, stack in stacks:  # losses of one stack reach routers of the other, too
            silent.moe_aux_loss_coeff = 0.0
            model.zero_grad()
            (model(source_BS, target_BS) * 0.0).sum().backward()
            silent.moe_aux_loss_coeff = 0.5
            last = [layer.mlp.router for layer in stack.layers if isinstance(layer.mlp, SwitchMLP)]
            assert last[-1].weight.grad.any()
