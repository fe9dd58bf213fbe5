"""Jobs: what is refused before a script is written, and what is only said."""

import pytest
from support.launch_job import MODEL, job

from megatron_switch.errors import ConfigError, LayoutError
from megatron_switch.launch.job import Container, seconds_of


def test_the_layout_is_what_the_flags_say():
    found = job(
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
        "--expert-model-parallel-size",
        "16",
        "--expert-tensor-parallel-size",
        "1",
    )
    assert found.world_size == 32
    assert (found.layout.tp, found.layout.ep, found.layout.etp, found.layout.dp) == (2, 16, 1, 16)
    assert (found.experts.members, found.experts.nodes) == (16, 2)


def test_flags_of_a_named_model_count_and_those_given_win():
    named = job(flags=("--switch-model", "switch-base-128", "--num-experts", "32"))
    assert named.values.integer("num-experts") == 32
    assert named.values.integer("num-layers") == 12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tensor-model-parallel-size", "3"), "--tensor-model-parallel-size"),
        (("--expert-model-parallel-size", "5"), "--expert-model-parallel-size"),
        (("--num-attention-heads", "6", "--tensor-model-parallel-size", "4"), "heads"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(flags, message):
    with pytest.raises(LayoutError, match=message):
        job(*flags)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a b"}, r"--name may contain letters, digits .* got 'a b'"),
        ({"time_limit": "soon"}, r"--time takes minutes, .* got 'soon'"),
        ({"sbatch": ("--account=me",)}, r"--sbatch takes an sbatch option without leading dashes"),
        (
            {"container": Container("i", ("/a:/b",)), "run_dir": "/a/r"},
            r"--run-dir /a/r is in no mount\. Give an absolute",
        ),
        ({"container": Container("i"), "run_dir": "r"}, r"--run-dir r is in no mount"),
        ({"flags": (*MODEL, "--wandb-exp-name", "x\ntouch y")}, r"'x\\ntouch y' has others"),
        ({"run_dir": "r\nx"}, r"printable characters only"),
        ({"run_dir": ""}, r"--run-dir must be a non-empty path"),
        ({"run_dir": "r%j"}, r"without % .* got 'r%j'"),
        ({"save_seconds": 70_000}, r"--save-seconds 70000 with --time"),
        ({"time_limit": "4", "save_seconds": 300}, r"--save-seconds 300 with --time 4\. Lower"),
        ({"sbatch": ("array=0-3",)}, r"--sbatch array=0-3 conflicts .* belongs to one job"),
        ({"sbatch": ("account=a # b",)}, r"--sbatch takes an sbatch option"),
        ({"sbatch": ("nodes=3",)}, r"--sbatch nodes=3 conflicts .* use --nodes"),
        (
            {"container": Container("i", ("/data",))},
            r"--container-mount takes one SOURCE:DEST.*/da",
        ),
        ({"flags": (*MODEL, "--switch-run-dir", "x")}, r"set --switch-run-dir.*use --run-dir"),
        ({"flags": (*MODEL, "--switch-device", "cpu")}, r"set --switch-device themselves"),
    ],
)
def test_values_that_cannot_be_rendered_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        job(**changes)


@pytest.mark.parametrize("time", ["90", "90:00", "12:00:00", "2-0", "2-12:30:00"])
def test_times_are_those_of_slurm(time):
    assert job(time_limit=time).time_limit == time


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("0", 0), ("90", 5400), ("1:30", 90), ("2:00:01", 7201), ("1-2", 93600), ("1-2:03", 93780)],
)
def test_times_in_seconds(time, seconds):
    assert seconds_of(time) == seconds


def test_a_run_folder_in_a_shared_mount_is_accepted():
    box = Container("image", ("/data:/data", "/runs:/runs"))
    assert job(container=box, run_dir="/runs/one").container == box


def test_missing_flags_are_warned_about():
    whole = (
        "--save-interval",
        "100",
        "--lr",
        "1e-3",
        "--train-samples",
        "9",
        "--tokenizer-type",
        "x",
    )
    assert job(*whole).notes == []
    first, second = job().notes
    assert "Without --save-interval" in first
    assert "also needs --train-iters, --lr, --tokenizer-type: add them after --" in second
    assert "--data-path" in job(flags=whole).notes[0]
