"""Stages with unequal numbers of layers are rewritten to any others, and training goes on alike."""

import pytest
from support.tiny_run import EXACT, read_records, run_command, trained

from megatron_switch.checkpoint.formats.dist_metadata import read_common_state, read_index
from megatron_switch.checkpoint.load.files import find_checkpoint
from megatron_switch.testing.checkpoints import compare_checkpoints

pytestmark = pytest.mark.slow

MODEL = (
    f"{EXACT} --mock-data --disable-bias-linear --num-layers 3 --moe-layer-freq [0,1,0] "
    "--train-iters 3 --lr-decay-iters 50 --eval-iters 0"
)
TWO_STAGES = "--pipeline-model-parallel-size 2"
SHORT_FIRST = f"{TWO_STAGES} --decoder-first-pipeline-num-layers 1"
SHORT_LAST = f"{TWO_STAGES} --pipeline-model-parallel-layout Ett|tL"


def resharded(source, target, flags=""):
    outcome = run_command("reshard", "--load", str(source), "--save", str(target), *flags.split())
    assert outcome.code == 0, outcome.errors
    return find_checkpoint(target).folder


def losses(folder):
    return {r["iteration"]: r["lm_loss"] for r in read_records(folder / "metrics.jsonl")}


def ranks_of_layers(folder):
    """Return for each layer the rank whose file holds its weights."""
    places = read_index(folder).storage_data.items()
    return {
        index.fqn.split(".")[2]: place.relative_path.split("_")[2]
        for index, place in places
        if index.fqn.startswith("decoder.layers.") and index.fqn.endswith("linear_proj.weight")
    }


@pytest.mark.timeout(300)
def test_from_unequal_stages_to_one_and_to_others(tmp_path):
    whole, one, two = (tmp_path / name for name in ("whole", "one", "two"))
    trained(f"{MODEL} {SHORT_FIRST} --switch-run-dir {whole}", ranks=2)
    expected = losses(whole)
    (whole / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")

    folder = resharded(whole, tmp_path / "for_one")
    assert read_common_state(folder)["args"].decoder_first_pipeline_num_layers is None
    trained(f"{MODEL} --exit-interval 2 --load {tmp_path / 'for_one'} --switch-run-dir {one}")

    folder = resharded(one, tmp_path / "for_two", SHORT_LAST)
    assert read_common_state(folder)["args"].pipeline_model_parallel_layout == "Ett|tL"
    assert ranks_of_layers(folder) == {"0": "0", "1": "0", "2": "1"}
    trained(f"{MODEL} {SHORT_LAST} --load {tmp_path / 'for_two'} --switch-run-dir {two}", ranks=2)
    found = losses(one) | losses(two)
    assert found == pytest.approx({step: expected[step] for step in (2, 3)}, rel=1e-5)
    last = find_checkpoint(two / "checkpoints").folder
    assert compare_checkpoints(whole / "checkpoints" / last.name, last, tolerance=1e-5) == []

    outcome = run_command(
        *("reshard", "--load", str(whole), "--save", str(tmp_path / "none")),
        *("--pipeline-model-parallel-size", "2"),
    )
    assert outcome.code == 2
    assert "--decoder-first-pipeline-num-layers" in outcome.errors
    assert not (tmp_path / "none").exists()
