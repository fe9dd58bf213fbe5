"""The command that writes launch scripts: from plans, from flags, and never over old ones."""

import json
import os

import pytest

from megatron_switch.cli import main
from megatron_switch.commands import table
from megatron_switch.errors import ConfigError, LayoutError

FLAGS = ["--num-experts", "16", "--expert-model-parallel-size", "8", "--data-path", "corpus"]


def render(tmp_path, *words, flags=FLAGS):
    output = ["--run-dir", "runs/one", "--output", str(tmp_path)]
    return table.run("render-launch", [*output, *words, "--", *flags])


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as stream:
        patch.setattr("sys.stdout", stream)
        words = ["--model", "switch-base-128", "--hardware", "a100-80gb-hdr", "--nodes", "2"]
        assert main(["plan", *words, "--json", "--", "--num-layers", "12"]) == 0
    return path


def test_two_scripts_are_written_and_the_shell_script_can_be_started(tmp_path, capsys):
    assert render(tmp_path, "--name", "mine", "--nodes", "2") == 0
    assert os.access(tmp_path / "mine.sh", os.X_OK)
    assert "#SBATCH --nodes=2" in (tmp_path / "mine.sbatch").read_text()
    said = capsys.readouterr().out
    assert f"sbatch {tmp_path}/mine.sbatch" in said
    assert "for 16 ranks" in said
    assert "Note: Without --save-interval" in said


def test_a_plan_gives_nodes_hardware_and_flags(tmp_path, plan):
    assert render(tmp_path, "--plan", str(plan), flags=["--data-path", "corpus"]) == 0
    text = (tmp_path / "switch.sbatch").read_text()
    planned = json.loads(plan.read_text())["plans"][0]["flags"]
    assert "2 nodes x 8 GPUs (A100" in text
    for flag in (word for word in planned if word.startswith("--")):
        assert f"  {flag}" in text
    assert "--data-path corpus" in text


def test_a_plan_for_another_world_size_is_refused(tmp_path, plan):
    with pytest.raises(LayoutError, match=r"is for 16 ranks .* but the job has 32\. Plan again"):
        render(tmp_path, "--plan", str(plan), "--nodes", "4")


@pytest.mark.parametrize(
    ("words", "flags", "message"),
    [
        ((), [], r"nothing to launch: give a plan with --plan"),
        (("--container-mount", "/a:/b"), FLAGS, r"belong to a container: add --container-image"),
        (("--hardware", "none"), FLAGS, r"--hardware names a preset or a JSON file"),
        (("--gpus-per-node", "6"), FLAGS, r"--expert-model-parallel-size"),
    ],
)
def test_what_cannot_be_launched_is_refused(tmp_path, words, flags, message):
    with pytest.raises(ConfigError, match=message):
        render(tmp_path, *words, flags=flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nodes", ["0", "many", "99999999999"])
def test_numbers_that_no_cluster_has_are_refused(tmp_path, capsys, nodes):
    with pytest.raises(SystemExit, match="2"):
        render(tmp_path, "--nodes", nodes)
    assert f"takes a whole number from 1 to 1048576, got '{nodes}'" in capsys.readouterr().err


def test_the_rehearsal_that_is_named_is_of_the_same_flags(tmp_path, capsys):
    render(tmp_path, flags=[*FLAGS, "--switch-dispatch", "packed"])
    said = capsys.readouterr().out
    assert "rehearse --world-size 8 --ranks-per-node 8 --rank 0 -- --num-experts 16" in said
    assert said.rstrip().endswith("--switch-dispatch packed --switch-dispatch padded")


def test_scripts_are_not_replaced_unless_told(tmp_path):
    render(tmp_path)
    before = (tmp_path / "switch.sbatch").read_text()
    with pytest.raises(ConfigError, match=r"switch\.sbatch and .*switch\.sh exist\. Give"):
        render(tmp_path, "--nodes", "2")
    assert (tmp_path / "switch.sbatch").read_text() == before
    assert render(tmp_path, "--nodes", "2", "--force") == 0
    assert (tmp_path / "switch.sbatch").read_text() != before


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output .*/file cannot be written"):
        table.run(
            "render-launch", ["--run-dir", "r", "--output", str(tmp_path / "file"), "--", *FLAGS]
        )
