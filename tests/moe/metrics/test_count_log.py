"""Megatron's tokens-per-expert files hold the tokens that experts kept, once a micro-batch."""

import json

import torch
from megatron.core import tensor_parallel
from megatron.training.activation_logging import ActivationLogger
from support.layout_case import Layout, Part, start_groups
from support.switch_case import LAYER, Case, Oracle, build_layer
from torch import nn

from megatron_switch.emulation import cuda_on_cpu
from megatron_switch.moe.metrics.count_log import register_count_hooks
from megatron_switch.testing.ranks import run_ranks
from megatron_switch.upstream.patching import Patch, applied, source_sha256

TARGET = "megatron.training.activation_logging:ActivationLogger.register_tpe_hooks"


def test_counts_are_kept_tokens_in_every_mode(tmp_path):
    run_ranks(_check_counts, 2, tmp_path)


def _check_counts(rank, folder):
    layout = Layout(2, ep=2)
    part = Part(layout, start_groups(layout))
    case = Case({"overlap_chunks": 2}, padding=True)
    oracle = Oracle(case, num_microbatches=2)
    modes = [("packed", False), ("padded", False), ("packed", True)]
    patch = Patch(TARGET, "test", register_count_hooks, sha256=(source_sha256(TARGET),))
    with cuda_on_cpu(), applied([patch]):
        for iteration, (dispatch, recompute) in enumerate(modes):
            layer = build_layer(case, layout, part.groups, dispatch)
            logger = ActivationLogger(str(folder))
            logger.register_tpe_hooks([nn.ModuleList([layer])])
            for _ in range(2):
                _run(layer, oracle, part, recompute)
            logger.save_tpe(iteration)
            logger.remove_tpe_hooks()
            _run(layer, oracle, part, recompute)
            assert not logger._decoder_tpe_records
    slot_T = torch.tensor(oracle.slot_T)
    kept_T = (slot_T >= 0) & (slot_T < oracle.capacity)
    expert_T = (oracle.x_MBSD.flatten(0, 2) @ oracle.weights["router"].t()).argmax(dim=1)
    counts_E = torch.bincount(expert_T[kept_T], minlength=4).tolist()
    mine = counts_E[2 * rank : 2 * rank + 2]
    path = folder / "tokens_per_expert" / f"rank{rank}.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"iter": iteration, "block": "decoder", "layer": LAYER - 1, "tpe": [mine, mine]}
        for iteration in range(len(modes))
    ]


def _run(layer, oracle, part, recompute):
    hidden_SBD = part.of(oracle.x_MBSD).view(2, -1, 6).transpose(0, 1).clone().requires_grad_()
    mask_BS = oracle.padding_MBS[part.microbatch]

    def forward(hidden_SBD):
        return layer(hidden_SBD, padding_mask=mask_BS)[0]

    if recompute:
        output_SBD = tensor_parallel.checkpoint(forward, False, hidden_SBD)
    else:
        output_SBD = forward(hidden_SBD)
    output_SBD.sum().backward()


def test_a_dense_model_has_nothing_to_count(tmp_path):
    logger = ActivationLogger(str(tmp_path))
    register_count_hooks(logger, [nn.Linear(2, 2)])
    logger.save_tpe(1)
    assert not logger._tpe_hooks
    assert not list(tmp_path.iterdir())
