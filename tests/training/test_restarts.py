"""A restart continues the run: nothing is trained twice, and no failed start changes its folder."""

import re
import shlex
import shutil

import pytest
from support.tiny_run import SPARSE, run_command, train, trained

from megatron_switch.checkpoint.load.files import TRACKER, find_checkpoint
from megatron_switch.utils.folder_lock import FolderLock

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run folder whose iterations are all saved, with the flags that made it."""
    folder = tmp_path_factory.mktemp("first") / "run"
    flags = f"{SPARSE} {data} --save-interval 1"
    trained(f"{flags} --switch-run-dir {folder}")
    return flags, folder


@pytest.fixture
def copied(run, tmp_path):
    """A copy of that folder."""
    flags, folder = run
    shutil.copytree(folder, tmp_path / "run")
    return f"{flags} --switch-run-dir {tmp_path / 'run'}", tmp_path / "run"


def iterations(outcome):
    """Return which iterations a run trained."""
    assert outcome.code == 0, outcome.screen + outcome.errors
    return [int(number) for number in re.findall(r"\] iteration +(\d+)/", outcome.screen)]


def resumed(folder):
    """Run what resume.sh executes, in a fork instead of a new interpreter."""
    words = shlex.split((folder / "resume.sh").read_text().splitlines()[-1])
    return run_command(*words[4:-1])


def test_a_restart_continues_behind_the_step_that_the_first_start_began_with(copied):
    flags, folder = copied
    assert iterations(train(f"{flags} --ckpt-step 1 --exit-interval 3")) == [2, 3]
    assert iterations(resumed(folder)) == [4]


def test_a_restart_of_a_fine_tuned_run_continues_it(run, tmp_path):
    flags, folder = run
    new = tmp_path / "new"
    start = f"{flags} --load {folder / 'checkpoints'} --finetune --switch-run-dir {new}"
    assert iterations(train(f"{start} --exit-interval 2")) == [1, 2]
    assert iterations(resumed(new)) == [3, 4]


def test_a_start_that_does_not_load_leaves_the_folder_as_it_was(copied):
    flags, folder = copied
    before = contents(folder)
    outcome = train(f"{flags} --ckpt-step 1 --log-interval 2", prepare=_fail_to_load)
    assert outcome.code == 1
    assert before.items() <= contents(folder).items()


def contents(folder):
    """Return what each file holds, but for the log, which has this start too."""
    files = (path for path in folder.rglob("*") if path.is_file() and "log" not in path.parts)
    return {path.relative_to(folder): path.read_bytes() for path in files}


def _fail_to_load():
    from megatron.training import training

    def fail(*args, **kwargs):
        raise RuntimeError("the disk of the checkpoint is broken")

    training.load_checkpoint = fail


def test_a_run_that_was_killed_in_its_first_save_begins_again(copied):
    flags, folder = copied
    checkpoints = folder / "checkpoints"
    for number in (2, 3, 4):
        shutil.rmtree(checkpoints / f"iter_{number:07d}")
    (checkpoints / TRACKER).unlink()
    (checkpoints / "iter_0000001" / "metadata.json").unlink()
    outcome = train(flags)
    assert iterations(outcome) == [1, 2, 3, 4]
    assert "what there is of iter_0000001 is renamed to *.incomplete" in outcome.screen
    assert (checkpoints / "iter_0000001.incomplete").is_dir()
    assert find_checkpoint(checkpoints).iteration == 4


def test_a_folder_of_checkpoints_is_one_runs(run, tmp_path):
    flags, _ = run
    saving = f"{flags} --save {tmp_path}"
    trained(f"{saving} --exit-interval 1")
    refused = train(f"{saving} --seed 5")
    assert refused.code == 2
    assert f"give --load {tmp_path}; else give another folder to --save" in refused.errors
    lock = FolderLock(tmp_path, "--save")
    lock.acquire()
    busy = train(f"{saving} --load {tmp_path}")
    assert busy.code == 2
    assert f"Another process is training in --save {tmp_path}" in busy.errors
    lock.release()
    assert iterations(train(f"{saving} --load {tmp_path}")) == [2, 3, 4]


def test_old_checkpoints_are_deleted_and_the_newest_is_resumed(run, tmp_path):
    flags, _ = run
    keeping = f"{flags} --switch-run-dir {tmp_path / 'run'} --switch-keep-checkpoints 2"
    checkpoints = tmp_path / "run" / "checkpoints"
    assert iterations(train(f"{keeping} --exit-interval 3")) == [1, 2, 3]
    assert sorted(path.name for path in checkpoints.glob("iter_*")) == [
        *("iter_0000002", "iter_0000003")
    ]
    outcome = train(f"{keeping} --switch-keep-checkpoints 1 --save-retain-interval 2")
    assert iterations(outcome) == [4]
    assert f"Deleting old checkpoints in {checkpoints}: iter_0000003." in outcome.screen
    assert sorted(path.name for path in checkpoints.glob("iter_*")) == [
        *("iter_0000002", "iter_0000004")
    ]
    assert '"save_retain_interval": 2' in (tmp_path / "run" / "run.json").read_text()
