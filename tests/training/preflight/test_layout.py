"""Weights that cannot be in a rank's memory are refused before anything is built."""

from types import SimpleNamespace

import pytest
import torch

from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import stage_parameters
from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError
from megatron_switch.training.loop.global_state import validate
from megatron_switch.training.preflight import layout as layout_module
from megatron_switch.training.preflight.layout import check_layout, check_model_memory


@pytest.fixture
def args(sparse_line):
    """Arguments as validated: 4 layers of width 32, 4 experts in two of them."""
    args = sparse_line().args
    args.ffn_hidden_size = args.moe_ffn_hidden_size = 128
    args.kv_channels, args.padded_vocab_size, args.local_rank = 8, 1024, 0
    args.bf16 = args.fp16 = False
    args.moe_layer_freq = [0, 1, 0, 1]
    return args


@pytest.fixture
def memory(monkeypatch):
    """Set the memory of this host."""
    return lambda size: monkeypatch.setattr(
        layout_module.psutil, "virtual_memory", lambda: SimpleNamespace(total=size)
    )


def grid(args, *, ranks=1, ep=1):
    args.world_size, args.expert_model_parallel_size = ranks, ep
    return check_layout(args, SwitchConfig.from_args(args))


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ({}, 1),
        ({"num_virtual_stages_per_pipeline_rank": 2}, 2),
        ({"num_layers_per_virtual_pipeline_stage": 1}, 2),
        ({"num_layers_per_virtual_pipeline_stage": 2}, 1),
        ({"pipeline_model_parallel_layout": "Et|t|t|tL"}, 2),
        ({"pipeline_model_parallel_layout": "Ett|ttL"}, 1),
        (
            {
                "num_layers_per_virtual_pipeline_stage": 1,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            3,
        ),
    ],
)
def test_chunks_of_a_stage_are_counted_as_megatron_counts_them(args, flags, chunks):
    vars(args).update({"pipeline_model_parallel_size": 2, **flags})
    args.global_batch_size = 4 * args.micro_batch_size
    assert grid(args, ranks=2).vp == chunks
    args.rank, args.transformer_pipeline_model_parallel_size = 0, 2
    validate(args)
    assert (args.virtual_pipeline_model_parallel_size or 1) == chunks


def check(args, *, ranks_here=1, device="cpu", ep=1):
    layout = grid(args, ranks=ranks_here, ep=ep)
    check_model_memory(args, layout, device=device, ranks_here=ranks_here)


def weights(args):
    """Return the bytes of the whole model's weights in fp32."""
    return 4 * stage_parameters(Architecture.from_args(args), grid(args), 0).total


def test_weights_that_just_fit_pass(args, memory):
    memory(weights(args))
    check(args)


def test_weights_that_do_not_are_refused_with_both_sizes(args, memory):
    memory(weights(args) - 1)
    message = (
        r"A rank's weights alone would be 52\d\.\d KiB: 133K parameters of 4 bytes; this host has "
        r"52\d\.\d KiB for each of its 1 ranks\. .*--expert-model-parallel-size.*--num-experts"
    )
    with pytest.raises(ConfigError, match=message):
        check(args)


def test_half_precision_needs_half(args, memory):
    args.bf16 = True
    memory(weights(args) // 2)
    check(args)


def test_ranks_of_a_host_share_its_memory(args, memory):
    memory(weights(args))
    with pytest.raises(ConfigError, match=r"for each of its 2 ranks"):
        check(args, ranks_here=2)
    memory(2 * weights(args))
    check(args, ranks_here=2)


def test_experts_spread_over_ranks_are_on_none_whole(args, memory):
    memory(2 * weights(args) - 4)
    check(args, ranks_here=2, ep=2)


def test_a_gpu_has_its_own(args, monkeypatch):
    total = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: total)
    with pytest.raises(ConfigError, match=r"its GPU has 1\.0 KiB"):
        check(args, device="cuda")


def test_shares_that_are_not_known_here_are_not_judged(args, memory):
    memory(1)
    args.use_megatron_fsdp = True
    check(args)
