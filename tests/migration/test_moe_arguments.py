"""Arguments of DeepSpeed's mixture-of-experts layer become flags and notes."""

import pytest

from megatron_switch.commands.table import parse
from megatron_switch.errors import ConfigError
from megatron_switch.migration.moe_arguments import translate_moe
from megatron_switch.migration.translation import Translation


def translate(text):
    found = Translation()
    translate_moe(parse("from-deepspeed", ["ds_config.json", *text.split()]), found)
    return found


def notes(found):
    return {note.setting for note in found.notes}


def test_without_experts_nothing_is_said():
    assert translate("") == Translation()


def test_deepspeeds_defaults_are_not_switchs():
    found = translate("--num_experts 16")
    assert found.flags == {
        "--num-experts": "16",
        "--expert-model-parallel-size": "1",
        "--expert-tensor-parallel-size": "1",
        "--moe-expert-capacity-factor": "1",
        "--switch-eval-capacity-factor": "1",
        "--switch-min-capacity": "4",
        "--switch-capacity-rounding": "ceil",
    }
    assert {"use_rts", "capacity_factor", "l_aux", "MoE"} <= notes(found)


@pytest.mark.parametrize("flag", ["--ep-size", "--ep_size", "--expert_parallel_size"])
def test_the_tutorials_names_are_taken(flag):
    assert translate(f"--num-experts 16 {flag} 8").flags["--expert-model-parallel-size"] == "8"
    assert translate(f"--num-experts 16 {flag}=8").flags["--expert-model-parallel-size"] == "8"


def test_no_drop_is_packed_and_without_capacity():
    found = translate("--num-experts 8 --drop_tokens False")
    assert found.flags["--moe-expert-capacity-factor"] == "-1"
    assert found.flags["--switch-dispatch"] == "packed"
    assert "--switch-min-capacity" not in found.flags
    assert "use_rts" not in notes(found)


def test_what_has_an_equal():
    found = translate(
        "--num-experts 8 --capacity-factor 1.5 --eval-capacity-factor 2 --min-capacity 8 "
        "--noisy-gate-policy Jitter --moe-loss-coeff 0.1 --use-rts false "
        "--enable-expert-tensor-parallelism true --expert-interval 2"
    )
    assert found.flags["--moe-expert-capacity-factor"] == "1.5"
    assert found.flags["--switch-eval-capacity-factor"] == "2"
    assert found.flags["--switch-min-capacity"] == "8"
    assert found.flags["--moe-input-jitter-eps"] == "0.01"
    assert found.flags["--moe-aux-loss-coeff"] == "0.1"
    assert "--expert-tensor-parallel-size" not in found.flags
    assert notes(found) == {"capacity_factor"}


def test_what_has_none():
    found = translate(
        "--num-experts 8 --k 2 --use-residual true --use-tutel true --noisy-gate-policy RSample "
        "--expert-interval 4"
    )
    assert {"k", "use_residual", "use_tutel", "noisy_gate_policy", "expert_interval"} <= notes(
        found
    )
    interval = next(note.text for note in found.notes if note.setting == "expert_interval")
    assert "[0,0,0,1]*N" in interval


def test_experts_that_cannot_be_shared():
    with pytest.raises(ConfigError, match=r"10 experts cannot be shared evenly by --ep-size 4"):
        translate("--num-experts 10 --ep-size 4")


@pytest.mark.parametrize("text", ["--drop-tokens maybe", "--k two"])
def test_values_of_another_kind_are_mistakes_of_use(text):
    with pytest.raises(SystemExit):
        translate(f"--num-experts 8 {text}")
