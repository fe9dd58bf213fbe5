"""The size of micro-batches is no hyper-parameter where capacity is counted over each sequence.

Mistakes of others: a balance loss that is summed over sequences, or averaged over them and then
counted once a micro-batch, is weaker by the micro-batch size, and the log does not show it.
"""

import pytest
from support.tiny_run import EXACT, read_records, trained

from megatron_switch.testing.checkpoints import compare_checkpoints

pytestmark = pytest.mark.slow

COUNTED = ("lm_loss", "grad_norm", "load_balancing_loss", "z_loss", "dropped_fraction")
# A balance loss this strong shows in gradients and weights.
BALANCE = "--moe-aux-loss-coeff 1.0 --moe-expert-capacity-factor 0.9 --switch-min-capacity 0"


@pytest.mark.parametrize("more", ["", "--calculate-per-token-loss"])
def test_the_balance_loss_is_as_strong_with_one_sequence_as_with_four(data, tmp_path, more):
    runs = {}
    for size in (1, 4):
        folder = tmp_path / str(size)
        flags = f"{EXACT} {data} {BALANCE} {more} --switch-capacity-group sequence"
        trained(f"{flags} --micro-batch-size {size} --switch-run-dir {folder}")
        runs[size] = read_records(folder / "metrics.jsonl")
    for one, four in zip(runs[1], runs[4], strict=True):
        found = {name: four[name] for name in COUNTED}
        assert found == pytest.approx({name: one[name] for name in COUNTED}, rel=1e-5)
    last = [tmp_path / str(size) / "checkpoints" / "iter_0000004" for size in (1, 4)]
    assert compare_checkpoints(*last, tolerance=1e-4) == []
    assert runs[1][0]["dropped_fraction"] > 0
