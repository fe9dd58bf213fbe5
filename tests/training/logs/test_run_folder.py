"""A run folder belongs to one run, says what that run is, and continues it."""

import csv
import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from support.run_arguments import arguments

from megatron_switch.errors import ConfigError
from megatron_switch.layout.grid import Layout
from megatron_switch.testing.checkpoints import save_checkpoint
from megatron_switch.training.arguments.parser import parse_command_line
from megatron_switch.training.logs.run_folder import COMMAND_VARIABLE, RunFolder
from megatron_switch.training.logs.run_record import SCHEMA
from megatron_switch.utils.folder_lock import FolderLock


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def described(folder, args, words):
    hosts = ["node1", "node1"]
    folder.describe(args, words, "cpu", layout=Layout(2), hosts=hosts, ranks_per_node=2)


def started(folder, **changes):
    """Start the folder's run, as rank 0 does."""
    args = arguments(**changes)
    folder.check_ownership()
    folder.check_identity(args)
    folder.path.mkdir(exist_ok=True)
    described(folder, args, ["--lr", "1e-3", "--data-path", "my text"])
    return json.loads((folder.path / "run.json").read_text())


def a_checkpoint(folder):
    common = {"iteration": 3, "checkpoint_version": 3.0, "args": Namespace()}
    save_checkpoint(folder, 3, {"weight": torch.zeros(2)}, common)


def test_flags_that_were_not_given_point_into_the_folder(folder):
    args = arguments()
    assert folder.apply(args, explicit=()) == ()
    path = folder.path
    assert (args.save, args.tensorboard_dir) == (f"{path}/checkpoints", f"{path}/tensorboard")
    assert args.switch_metrics_file == f"{path}/metrics.jsonl"
    assert (args.load, args.save_interval) == (None, 1000)
    assert not path.exists()  # nothing is written before the run is known to be the folder's


def test_given_flags_stay(folder):
    args = arguments(save="elsewhere", tensorboard_dir="boards", save_interval=7)
    folder.apply(args, explicit={"save", "tensorboard_dir", "save_interval"})
    assert (args.save, args.tensorboard_dir, args.save_interval) == ("elsewhere", "boards", 7)


def test_a_checkpoint_of_the_run_is_loaded(folder):
    folder.checkpoints.mkdir(parents=True)
    args = arguments()
    folder.apply(args, explicit=())
    assert args.load is None
    a_checkpoint(folder.checkpoints)
    assert folder.apply(args, explicit=()) == ()
    assert args.load == str(folder.checkpoints)
    named = arguments(load=f"{folder.path}/../run/checkpoints", ckpt_step=3)
    assert folder.apply(named, explicit={"load", "ckpt_step"}) == ()
    assert (named.load, named.ckpt_step) == (str(folder.checkpoints), 3)


def test_a_run_that_began_from_another_checkpoint_continues_from_its_own(folder):
    flags = {"load": "pretrained", "finetune": True, "ckpt_step": 9}
    args = arguments(**flags)
    folder.apply(args, explicit=set(flags))
    assert (args.load, args.finetune, args.ckpt_step) == ("pretrained", True, 9)
    a_checkpoint(folder.checkpoints)
    (note,) = folder.apply(args, explicit=set(flags))
    assert note.endswith("--load pretrained was where this run began.")
    assert (args.load, args.finetune, args.ckpt_step) == (str(folder.checkpoints), False, None)


@pytest.mark.parametrize("names", [(), ("log", "tensorboard"), (".run.json.x1", "ranks.csv")])
def test_a_folder_without_a_run_is_taken(folder, names):
    folder.path.mkdir()
    for name in names:
        (folder.path / name).touch()
    assert started(folder)["schema"] == SCHEMA


def test_a_foreign_folder_is_refused_and_left_as_it_is(folder):
    folder.path.mkdir()
    for name in ("photos", "thesis.tex", "log"):
        (folder.path / name).touch()
    with pytest.raises(ConfigError, match=r"no run\.json: it has photos, thesis\.tex\. Give a new"):
        folder.check_ownership()
    assert len(list(folder.path.iterdir())) == 3


def test_a_file_is_refused(folder):
    folder.path.touch()
    with pytest.raises(ConfigError, match=r"--switch-run-dir .*run is a file\. Give a folder"):
        folder.check_ownership()


def test_the_same_run_may_start_again(folder):
    first = started(folder)
    assert started(folder, params_dtype=torch.float32)["identity"] == first["identity"]


def test_another_run_is_refused_with_both_values(folder):
    before = started(folder)
    with pytest.raises(ConfigError, match=r"(?s)another run:\n  --seed: 1234 there, 5 now\n"):
        started(folder, seed=5)
    message = r"(?s)--num-experts: 8 there, None now.*--data-path: \['text'\] there, \['other'\]"
    with pytest.raises(ConfigError, match=message):
        started(folder, data_path=["other"], num_experts=None)
    assert json.loads((folder.path / "run.json").read_text()) == before


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"identity"'])
def test_a_record_that_cannot_be_read_is_named(folder, content):
    folder.path.mkdir()
    (folder.path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=r"run\.json cannot be read as the record of a run"):
        started(folder)


def test_the_rank_table_has_the_host_of_each_rank(folder):
    started(folder)
    rows = list(csv.DictReader((folder.path / "ranks.csv").read_text().splitlines()))
    assert [(row["rank"], row["host"]) for row in rows] == [("0", "node1"), ("1", "node1")]


def test_the_end_of_a_start_is_recorded(folder):
    started(folder)
    folder.record_end(code=0, reason="finished", iteration=4)
    assert json.loads((folder.path / "run.json").read_text())["starts"][0]["exit"]["code"] == 0


def resume_words(folder, monkeypatch, tmp_path):
    """Run resume.sh with a program in Python's place that prints its words."""
    script = folder.path / "resume.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    text = script.read_text().replace(sys.executable, str(fake))
    script.write_text(text)
    done = subprocess.run([str(script), "--exit-interval", "5"], capture_output=True, text=True)
    return done.stdout.splitlines()


def test_resume_runs_the_same_command_and_takes_more_flags(folder, monkeypatch, tmp_path):
    started(folder)
    where, *words = resume_words(folder, monkeypatch, tmp_path)
    assert where == str(Path.cwd())
    given = ["--lr", "1e-3", "--data-path", "my text"]
    assert words == ["-m", "megatron_switch", "train", *given, "--exit-interval", "5"]


@pytest.mark.parametrize("step", [["--ckpt-step", "10"], ["--ckpt-step=10"]])
def test_resume_continues_behind_what_ckpt_step_began_with(folder, monkeypatch, tmp_path, step):
    args = arguments(load="own", save="own")
    folder.path.mkdir()
    described(folder, args, ["--lr", "1e-3", *step, "--seed", "5"])
    _, *words = resume_words(folder, monkeypatch, tmp_path)
    assert words[3:-2] == ["--lr", "1e-3", "--seed", "5"]


def test_resume_begins_where_the_run_began_until_it_has_saved(folder, monkeypatch, tmp_path):
    folder.path.mkdir()
    described(folder, arguments(load="another", save="own"), ["--ckpt-step", "10"])
    _, *words = resume_words(folder, monkeypatch, tmp_path)
    assert words[3:-2] == ["--ckpt-step", "10"]


def test_resume_says_how_to_train_longer_than_was_planned(folder):
    started(folder)
    flags = re.search(r"# To train longer .*: (--.*)", (folder.path / "resume.sh").read_text())[1]
    args = parse_command_line(flags.replace("N", "400").split()).args
    assert (args.train_iters, args.override_opt_param_scheduler) == (400, True)


def test_resume_starts_torchrun_where_torchrun_started_the_run(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    started(folder)
    _, *words = resume_words(folder, monkeypatch, tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=4", "--nnodes=1"]
    assert words[:7] == [*torchrun, "-m", "megatron_switch", "train"]


def test_resume_starts_the_launcher_that_left_its_command(folder, monkeypatch, tmp_path):
    monkeypatch.setenv(COMMAND_VARIABLE, f"{sys.executable} launcher -n '2 3'")
    started(folder)
    _, *words = resume_words(folder, monkeypatch, tmp_path)
    assert words == ["launcher", "-n", "2 3", "--exit-interval", "5"]


def test_a_held_folder_is_still_nobodys(folder):
    folder.path.mkdir()
    FolderLock(folder.path, "--switch-run-dir").acquire()
    folder.check_ownership()
