"""What messages about resuming advise is done here, and works.

Each row is a run that is refused or noted, the flag that its message names, and what then holds.
"""

import pytest
from support.tiny_run import EXACT, read_records, train, trained

from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.testing.checkpoints import load_tensors

pytestmark = pytest.mark.slow

SAVED, LAST = 2, 4
OVERRIDE, KEEP = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"
OPTIMIZERS = {"distributed": EXACT, "plain": EXACT.replace("--use-distributed-optimizer", "")}


@pytest.fixture(scope="module", params=OPTIMIZERS)
def run(request, data, tmp_path_factory):
    """A run of two kinds, saved in every iteration, with the flags that made it."""
    folder = tmp_path_factory.mktemp("run")
    flags = f"{OPTIMIZERS[request.param]} {data} --lr-decay-iters 50"
    trained(f"{flags} --save {folder}")
    return flags, folder


def resumed(run, tmp_path, more):
    """Resume from the second iteration into a folder of its own; return metrics and folder."""
    flags, folder = run
    outcome = trained(
        f"{flags} --load {folder} --ckpt-step {SAVED} --switch-run-dir {tmp_path / 'new'} {more}"
    )
    return outcome, read_records(tmp_path / "new" / "metrics.jsonl"), tmp_path / "new"


def moments(folder, iteration):
    tensors = load_tensors(find_checkpoint(folder, iteration=iteration).folder)
    return {name: value for name, value in tensors.items() if "exp_avg" in name}


def same(first, second):
    return first.keys() == second.keys() and all(first[k].equal(second[k]) for k in first)


def test_another_learning_rate_is_taken_and_moments_are_kept(run, tmp_path):
    flags, folder = run
    again = f"{flags} --load {folder} --ckpt-step {SAVED} --lr 5e-4"
    refused = train(again)
    assert refused.code == 2
    assert OVERRIDE in refused.errors
    _, records, new = resumed(run, tmp_path, f"--lr 5e-4 {OVERRIDE} --save-interval 1")
    assert [record["iteration"] for record in records] == [3, 4]
    assert records[0]["learning_rate"] < 5e-4
    # Moments after one more step depend on the gradient and on what was loaded, not on the rate.
    ours = moments(new / "checkpoints", SAVED + 1)
    assert ours
    assert same(ours, moments(folder, SAVED + 1))
    assert not same(moments(new / "checkpoints", LAST), moments(folder, LAST))


def test_the_checkpoints_schedule_is_kept(run, tmp_path):
    _, folder = run
    _, _, new = resumed(run, tmp_path, f"--lr 5e-4 {KEEP} --save-interval 1")
    assert same(moments(new / "checkpoints", LAST), moments(folder, LAST))


def test_an_optimizer_that_starts_anew_is_said_to(run, tmp_path):
    outcome, records, _ = resumed(run, tmp_path, "--no-load-optim")
    assert "learning-rate schedule start anew" in outcome.screen
    assert records[-1]["iteration"] == LAST


def test_a_checkpoint_without_optimizer_or_random_states_is_resumed_with_a_note(run, tmp_path):
    flags, _ = run
    folder = tmp_path / "bare"
    trained(f"{flags} --save {folder} --no-save-optim --no-save-rng --exit-interval {SAVED}")
    outcome = trained(f"{flags} --load {folder} --save {folder}")
    assert "no optimizer state: it was saved with --no-save-optim" in outcome.screen
    assert "no states of random generators: it was saved with --no-save-rng" in outcome.screen
    assert find_checkpoint(folder).iteration == LAST
