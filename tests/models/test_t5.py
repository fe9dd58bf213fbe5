"""Switch-T5 computes what Hugging Face's model computes, and the same on any number of ranks."""

import pytest
import torch
from support.t5_case import (
    DECODER_PATTERN,
    ENCODER_PATTERN,
    EXPERTS,
    VOCAB,
    build_t5,
    converted,
    copy_shards,
    hugging_face_model,
    shard,
)
from support.tiny_gpt import model_parallel

from megatron_switch.config import SwitchConfig
from megatron_switch.moe.switch_mlp import SwitchMLP
from megatron_switch.testing.ranks import run_ranks

pytestmark = pytest.mark.slow

BATCH, SOURCE, TARGET = 3, 12, 8


def batch():
    """Tokens of both sides and the padding of each, on the right."""
    generator = torch.Generator().manual_seed(5)
    source_BS = torch.randint(1, VOCAB, (BATCH, SOURCE), generator=generator)
    target_BS = torch.randint(1, VOCAB, (BATCH, TARGET), generator=generator)
    return {
        "source": source_BS,
        "target": target_BS,
        "source_padding": torch.arange(SOURCE) >= torch.tensor([12, 9, 5])[:, None],
        "target_padding": torch.arange(TARGET) >= torch.tensor([8, 6, 7])[:, None],
    }


@pytest.mark.parametrize("capacity", [2, 64], ids=["binding", "not binding"])
@pytest.mark.parametrize("gated", [False, True], ids=["relu", "gated"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_encoder_output_and_logits_are_hugging_face_s(tied, gated, capacity):
    run_ranks(_check_parity, 1, tied, gated, capacity)


def _check_parity(rank, tied, gated, capacity):
    theirs = hugging_face_model(tied=tied, gated=gated, capacity=capacity)
    given = batch()
    with torch.no_grad():
        expected = theirs(
            input_ids=given["source"],
            attention_mask=(~given["source_padding"]).long(),
            decoder_input_ids=given["target"],
        )
    switch = SwitchConfig(capacity=capacity, capacity_group="sequence", dispatch="packed")
    with model_parallel():
        model = build_t5(switch, tied=tied, gated=gated).eval()
        weights = converted(theirs.state_dict(), tied=tied)
        problem = model.load_state_dict(weights, strict=False)
        assert not problem.unexpected_keys
        assert [name for name in problem.missing_keys if "_extra_state" not in name] == []
        dropped = []
        for module in model.modules():
            if isinstance(module, SwitchMLP):
                module.router.register_forward_hook(
                    lambda _, __, out: dropped.append((~out[0].routing.kept_T).sum())
                )
        with torch.no_grad():
            encoded_SBD = model.encode(given["source"], given["source_padding"])
            unpadded_drops = sum(dropped) - 2 * given["source_padding"].sum()
            logits_BSV = model(
                None,
                given["target"],
                encoder_padding=given["source_padding"],
                encoder_hidden_states=encoded_SBD,
            )
    real_BS = ~given["source_padding"]
    encoded_BSD = encoded_SBD.transpose(0, 1)
    torch.testing.assert_close(
        encoded_BSD[real_BS], expected.encoder_last_hidden_state[real_BS], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(logits_BSV, expected.logits, rtol=0, atol=1e-5)
    assert (unpadded_drops > 0) == (capacity == 2)


def test_a_decoder_position_sees_nothing_that_comes_later():
    run_ranks(_check_causality, 1)


def _check_causality(rank):
    given = batch()
    with model_parallel():
        model = build_t5(SwitchConfig(capacity=2, capacity_group="sequence", dispatch="packed"))
        changed = given["target"].clone()
        changed[:, 5:] = 1
        with torch.no_grad():
            before = model(given["source"], given["target"])
            after = model(given["source"], changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().amax() > 1e-3


def test_padding_changes_no_real_position_and_takes_no_slot():
    run_ranks(_check_padding, 1)


def _check_padding(rank):
    given = batch()
    with model_parallel():
        model = build_t5(SwitchConfig(capacity=6, dispatch="packed")).eval()
        changed = torch.where(given["source_padding"], 7, given["source"])
        masks = {
            "encoder_padding": given["source_padding"],
            "decoder_padding": given["target_padding"],
        }
        with torch.no_grad():
            before = model(given["source"], given["target"], **masks)
            after = model(changed, given["target"], **masks)
            unmasked = model(changed, given["target"])
    assert torch.equal(before, after)
    assert not torch.allclose(before, unmasked, atol=1e-4)


LAYOUTS = {
    "TP 2 with sequence parallelism": (2, {"tensor_model_parallel_size": 2}),
    "EP 2": (2, {"expert_model_parallel_size": 2}),
    "DP 2": (2, {}),
}


@pytest.mark.parametrize("gated", [False, True], ids=["relu", "gated"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_do_not_depend_on_the_layout(layout, gated, tmp_path):
    run_ranks(_keep_one_rank_s, 1, tmp_path / "one.pt", gated)
    world_size, sizes = LAYOUTS[layout]
    run_ranks(_compare, world_size, tmp_path / "one.pt", gated, sizes)


SWITCH = SwitchConfig(capacity=2, capacity_group="sequence", dispatch="packed")
LOSSES = {"moe_aux_loss_coeff": 0.05}


def loss_of(model, given, rows):
    loss_BS = model(
        given["source"][rows],
        given["target"][rows].roll(1, 1),
        encoder_padding=given["source_padding"][rows],
        decoder_padding=given["target_padding"][rows],
        lm_labels=given["target"][rows],
    )
    # As in training, where gradients are the mean over data-parallel ranks.
    return (loss_BS * ~given["target_padding"][rows]).sum() / (8 * len(loss_BS))


def even_batch():
    return {name: value[:2] for name, value in batch().items()}


def _keep_one_rank_s(rank, path, gated):
    torch.manual_seed(3)
    with model_parallel():
        model = build_t5(SWITCH, tied=True, parallel_output=True, gated=gated, **LOSSES)
        given = even_batch()
        loss = loss_of(model, given, slice(0, 2))
        loss.backward()
        torch.save(
            {
                "loss": loss.detach(),
                "weights": {name: value.detach() for name, value in model.named_parameters()},
                "gradients": {name: value.grad for name, value in model.named_parameters()},
            },
            path,
        )


def _compare(rank, path, gated, sizes):
    kept = torch.load(path, weights_only=True)
    with model_parallel(**sizes):
        tensor = sizes.get("tensor_model_parallel_size", 1)
        model = build_t5(
            SWITCH,
            tied=True,
            parallel_output=True,
            gated=gated,
            tensor_model_parallel_size=tensor,
            sequence_parallel=tensor > 1,
            expert_model_parallel_size=sizes.get("expert_model_parallel_size", 1),
            **LOSSES,
        )
        copy_shards(model, kept["weights"])
        groups = model.pg_collection
        replicas = groups.dp.size()
        given = even_batch()
        rows = slice(0, 2) if replicas == 1 else slice(groups.dp.rank(), groups.dp.rank() + 1)
        loss = loss_of(model, given, rows)
        loss.backward()
        total = loss.detach() / replicas
        torch.distributed.all_reduce(total, group=groups.dp)
        torch.testing.assert_close(total, kept["loss"], rtol=1e-5, atol=0)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad / replicas
            is_expert = ".experts." in name
            if getattr(parameter, "sequence_parallel", False):
                torch.distributed.all_reduce(gradient, group=groups.tp)
            torch.distributed.all_reduce(gradient, group=groups.expt_dp if is_expert else groups.dp)
            expected = shard(model, name, parameter, kept["gradients"][name])
            difference = (gradient - expected).norm() / expected.norm().clamp(min=1e-12)
            assert difference < 1e-5, (name, difference)


def test_layers_are_numbered_through_both_stacks():
    run_ranks(_check_numbers, 1)


def _check_numbers(rank):
    with model_parallel():
        model = build_t5(SwitchConfig(dispatch="packed"))
        layers = [module for module in model.modules() if isinstance(module, SwitchMLP)]
    assert [layer.layer_number for layer in layers] == [2, 4, 6]
    assert [layer.router.layer_number for layer in layers] == [2, 4, 6]
    assert len(ENCODER_PATTERN) + DECODER_PATTERN.index(1) + 1 == 6
    # Initial weights go by these numbers, so no two layers begin alike.
    firsts = [layer.experts.weight1[0] for layer in layers]
    assert not torch.equal(firsts[0], firsts[2])
    assert layers[0].experts.weight1.shape[0] == EXPERTS
