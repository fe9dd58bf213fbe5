"""``megatron-switch rehearse``: what it prints, and that a mistake in a launch stops it too.

Rehearsals run in forked processes; what they find goes through JSON here, as programs read it.
"""

import json

import pytest
from support.observed_run import SPARSE, TINY

from megatron_switch.architecture.model_flags import model_from_flags
from megatron_switch.architecture.parameters import stage_parameters
from megatron_switch.cli import main
from megatron_switch.commands.rehearse import launch_argv
from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import flags_of_argv
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.sizes import TP_PP_DP_ORDER, Sizes
from megatron_switch.rehearsal.ranks import sample

EP2 = "--expert-model-parallel-size 2"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules"


def rehearse(capfd, flags, *options, world_size=8):
    words = ["--world-size", str(world_size), *options, "--", *flags.split()]
    code = main(["rehearse", *words])
    return code, *capfd.readouterr()


@pytest.mark.slow
def test_every_stage_and_both_ends_are_reported(capfd):
    flags = f"{SPARSE} {EP2} --pipeline-model-parallel-size 2 --use-distributed-optimizer --bf16"
    code, out, err = rehearse(capfd, flags, "--json", "--ranks-per-node", "4")
    assert code == 0, err
    values = json.loads(out)
    assert values["schema"] == "megatron-switch/rehearsal/1"
    assert [rank["rank"] for rank in values["ranks"]] == [0, 4, 7]
    layout = Layout(8, pp=2, ep=2)
    shape = model_from_flags(flags_of_argv(flags.split()))
    for rank in values["ranks"]:
        count = stage_parameters(shape, layout, rank["coordinates"]["pp"])
        assert rank["parameters"] == {"dense": count.dense, "expert": count.expert}
        state = rank["state_bytes"]
        for part, copies in (("dense", layout.dp), ("expert", layout.edp)):
            number = getattr(count, part)
            # Weights and gradients lie in buffers with padded ends.
            assert state[f"{part} weights"] == pytest.approx(2 * number, abs=2048)
            assert state[f"{part} gradients"] == pytest.approx(4 * number, abs=4096)
            # Masters and two moments; parts of parameters have a step each, and padded ends.
            assert state[f"{part} optimizer"] == pytest.approx(12 * number / copies, abs=8192)
        assert rank["groups"]["ep"] == layout.group("ep", rank["rank"])
        assert rank["total_peak_bytes"] == sum(rank["peak_bytes"].values())
        assert rank["forward_flops"] * 2 == pytest.approx(rank["backward_flops"], rel=0.1)
        exchanges = [row for row in rank["collectives"] if row["kind"] == "all-to-all"]
        assert {row["num_members"] for row in exchanges} == {2}
        assert {row["num_nodes"] for row in rank["collectives"] if row["group"] == "pp"} == {2}
        assert "calls" not in rank


@pytest.mark.slow
def test_the_tables_show_memory_side_by_side_and_say_what_it_is(capfd):
    code, out, err = rehearse(capfd, f"{SPARSE} {EP2} --switch-capacity 4", "--rank", "5")
    assert code == 0, err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert any(line.startswith("GB activations ") for line in lines)
    assert "Rank 5: tp 0, cp 0, dp 5, pp 0, etp 0, ep 1, edp 2; experts 2 to 3" in lines
    assert "ep 2 4, 5" in lines
    assert any(line.startswith("all-to-all etp_ep 2 inside 1 ") for line in lines)
    assert "core attention keeps what a fused kernel keeps" in " ".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{SPARSE} --tensor-model-parallel-size 3", "8 ranks cannot form the dense grid"),
        (f"{TINY} --switch-moe", "There is no flag --switch-moe"),
        (SPARSE.replace("--mock-data", ""), "There is nothing to train on"),
        (f"{SPARSE} --global-batch-size 12", "--global-batch-size is 12"),
        (
            f"{SPARSE} --use-megatron-fsdp --pipeline-model-parallel-size 2",
            "Megatron-FSDP has no pipeline stages",
        ),
        (f"{SPARSE} --use-megatron-fsdp", "requires the `fsdp_dtensor` checkpointing format"),
        (
            f"{SPARSE} {OFFLOAD} core_attn --transformer-impl local",
            "Megatron offloads activations only beside Transformer Engine",
        ),
    ],
)
def test_a_mistake_stops_a_rehearsal_with_the_words_of_the_launch(flags, message, capfd):
    code, _, said = rehearse(capfd, flags)
    assert code == 2
    assert message in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{SPARSE} --switch-dispatch packed", "Packed dispatch cannot be rehearsed"),
        (f"{SPARSE} --switch-capacity-group ep", "--switch-capacity-group ep, --moe-expert"),
        (f"{SPARSE} --moe-expert-capacity-factor -1", "positive capacity factors"),
        (f"{SPARSE} --context-parallel-size 2", "Context parallelism cannot be rehearsed"),
        (f"{SPARSE} --fp8-format e4m3", "--fp8-format cannot be rehearsed"),
        (f"{SPARSE} --use-torch-fsdp2", "--use-torch-fsdp2 cannot be rehearsed"),
        (f"{SPARSE} --cpu-offloading-num-layers 1", "--cpu-offloading-num-layers cannot be"),
        (f"{SPARSE} {OFFLOAD} core_attn moe_act", "--offload-modules moe_act cannot be rehearsed"),
    ],
)
def test_what_cannot_be_rehearsed_says_so(flags, message, capfd):
    code, _, said = rehearse(capfd, flags, "--rank", "0")
    assert code == 2
    assert message in said
    assert "Traceback" not in said


def test_a_rank_outside_the_launch_is_refused(capfd):
    code, _, said = rehearse(capfd, TINY, "--rank", "8")
    assert code == 2
    assert "ranks 0 to 7, got --rank 8" in said


def test_a_rehearsal_needs_a_launch(capfd):
    assert main(["rehearse", "--world-size", "8"]) == 2
    assert "give them after --, or name a model" in capfd.readouterr().err


def test_a_model_stands_for_the_flags_of_a_launch():
    words = launch_argv("gpt-1.6t-128", 1024)
    flags = flags_of_argv(words)
    assert flags["expert-model-parallel-size"] == "128"
    assert str(flags["switch-model"]).endswith("gpt-1.6t-128.json")
    assert flags_of_argv(launch_argv("gpt-1.6t-128", 96))["expert-model-parallel-size"] == "32"
    with pytest.raises(ConfigError, match="no-such-model is neither"):
        launch_argv("no-such-model", 8)


def test_a_sample_has_the_first_rank_of_every_stage_and_the_last_of_all():
    assert sample(Sizes(8, tp=2, pp=2)) == [0, 4, 7]
    assert sample(Sizes(8, pp=4, order=TP_PP_DP_ORDER)) == [0, 1, 2, 3, 7]
    assert sample(Sizes(1)) == [0]
    assert sample(Sizes(8, tp=3, pp=2)) == [0]
