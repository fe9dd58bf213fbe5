"""A run goes on from a checkpoint that was rewritten for another layout, with the same loss.

Eight ranks train and save; their checkpoint is rewritten for one rank, that rank trains on and
saves; its checkpoint is rewritten for four. Losses and what is saved agree with the run of eight
ranks that was never interrupted.
"""

import pytest
from support.tiny_run import EXACT, read_records, run_command, trained

from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.testing.checkpoints import compare_checkpoints

pytestmark = pytest.mark.slow

EIGHT = (
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
)
FOUR = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2"
MODEL = (
    f"{EXACT} --disable-bias-linear --swiglu --train-iters 4 --lr-decay-iters 50 "
    "--eval-iters 0 --position-embedding-type rope"
)


def reshard(source, target, flags=""):
    outcome = run_command("reshard", "--load", str(source), "--save", str(target), *flags.split())
    assert outcome.code == 0, outcome.errors
    assert "read back and equal" in outcome.screen


def losses(folder):
    return {r["iteration"]: r["lm_loss"] for r in read_records(folder / "metrics.jsonl")}


@pytest.mark.timeout(300)
def test_eight_ranks_one_rank_four_ranks(data, tmp_path):
    model = f"{MODEL} {data}"
    whole, one, four = (tmp_path / name for name in ("whole", "one", "four"))
    trained(f"{model} {EIGHT} --switch-run-dir {whole}", ranks=8)
    expected = losses(whole)

    (whole / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    reshard(whole, tmp_path / "for_one")
    trained(f"{model} --exit-interval 2 --load {tmp_path / 'for_one'} --switch-run-dir {one}")
    reshard(one, tmp_path / "for_four", f"{FOUR} --world-size 4")
    flags = f"{FOUR} --sequence-parallel --expert-tensor-parallel-size 1"
    trained(f"{model} {flags} --load {tmp_path / 'for_four'} --switch-run-dir {four}", ranks=4)

    found = losses(one) | losses(four)
    assert sorted(found) == [2, 3, 4]
    assert found == pytest.approx({k: expected[k] for k in found}, rel=1e-5)
    last = find_checkpoint(four / "checkpoints").folder
    assert last.name == "iter_0000004"
    assert compare_checkpoints(whole / "checkpoints" / last.name, last, tolerance=1e-5) == []
