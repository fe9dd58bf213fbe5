"""The record of a run says what it is, and keeps every start and how it ended."""

import json
import os
import subprocess

import pytest
from support.run_arguments import arguments

from megatron_switch import __version__
from megatron_switch.layout.grid import Layout
from megatron_switch.training.logs import run_record
from megatron_switch.training.logs.run_record import RunRecord, identity_of, slurm_job

HOSTS = ["node1", "node1", "node2", "node2"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.json"


def begun(path, command="train --lr 1", **changes):
    record = RunRecord(path)
    record.begin(arguments(**changes), command, "cpu", layout=Layout(4, ep=2), hosts=HOSTS)
    return record


def read(path):
    return json.loads(path.read_text())


def test_the_record_says_what_the_run_is(path):
    begun(path)
    record = read(path)
    assert record["schema"] == "megatron-switch/run/1"
    assert record["identity"] == json.loads(json.dumps(identity_of(arguments())))
    assert record["seed"] == 1234
    assert (record["device"], record["command"]) == ("cpu", "train --lr 1")
    assert record["flags"]["num_layers"] == 4
    assert record["flags"]["params_dtype"] == "torch.bfloat16"
    assert record["versions"]["megatron-switch"] == __version__
    assert record["versions"]["megatron-core"] == "0.19.2"
    assert {"python", "torch"} <= set(record["versions"])
    assert record["hardware"]["cpus"] == os.cpu_count()


def test_every_start_is_kept_with_its_end(path, monkeypatch):
    begun(path).end(code=75, reason="SIGTERM", iteration=7)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    begun(path, command="train --lr 2", iteration=7)
    record = read(path)
    first, second = record["starts"]
    assert record["command"] == second["command"] == "train --lr 2"
    assert first["command"] == "train --lr 1"
    assert (first["iteration"], second["iteration"]) == (0, 7)
    assert {key: first["exit"][key] for key in ("code", "reason", "iteration")} == {
        "code": 75,
        "reason": "SIGTERM",
        "iteration": 7,
    }
    assert second["exit"] is None  # as it stays where the process is killed
    assert second["hosts"] == ["node1", "node2"]
    assert second["layout"] == {
        **{"ranks": 4, "tp": 1, "cp": 1, "pp": 1, "dp": 4},
        **{"etp": 1, "ep": 2, "edp": 2},
    }
    assert second["slurm"] == {"job_id": "42"}
    assert first["versions"] == second["versions"] == record["versions"]
    assert first["time"] <= second["time"]


def test_the_start_in_a_record_of_an_earlier_release_is_kept(path):
    path.write_text(json.dumps({"started": "2026-01-01", "command": "train", "versions": {}}))
    begun(path)
    first, second = read(path)["starts"]
    assert (first["time"], first["command"]) == ("2026-01-01", "train")
    assert second["hosts"] == ["node1", "node2"]


def test_a_start_that_was_not_recorded_has_no_end(path):
    RunRecord(path).end(code=1, reason="RuntimeError: broken", iteration=0)
    assert not path.exists()


def test_slurms_names_of_a_job():
    assert slurm_job({"HOME": "/"}) is None
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_ARRAY_TASK_ID": "3"}
    assert slurm_job(job) == {"job_id": "7", "array_task_id": "3", "restart_count": "2"}


def test_the_commit_is_that_of_this_package_only(monkeypatch):
    asked = []
    monkeypatch.setattr(run_record, "_git", lambda *words: asked.append(words[0]) or "abc-dirty")
    assert run_record._git_commit() == "abc-dirty"
    assert asked == ["ls-files", "describe"]  # first whether the checkout knows this file

    def unknown(*words):
        raise subprocess.CalledProcessError(1, "git")

    monkeypatch.setattr(run_record, "_git", unknown)
    assert run_record._git_commit() is None
