"""Training on padded data is the same on one rank and on many, and nothing waits for ever.

Losses, gradient norm and drops of whole runs are compared, from one checkpoint, with documents that
end in padding. A command that hangs is ended after a while and fails.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from support.tiny_run import EXACT, read_records, trained

pytestmark = pytest.mark.slow

PAD = 125
TIGHT = "--moe-expert-capacity-factor 0.8 --switch-eval-capacity-factor 0.9 --switch-min-capacity 0"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EP2 = "--expert-model-parallel-size 2"
COUNTED = ("lm_loss", "grad_norm", "load_balancing_loss", "z_loss", "dropped_fraction")


def write_documents(prefix: Path, number: int) -> None:
    """Write documents of 3 to 15 tokens, filled up to 20."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    random = torch.Generator().manual_seed(number)
    for length in torch.randint(3, 16, (number,), generator=random).tolist():
        tokens = torch.randint(PAD, (length,), generator=random)
        builder.add_item(torch.cat([tokens, torch.full((20 - length,), PAD)]))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.fixture(scope="module")
def padded_data(tmp_path_factory) -> str:
    """Return flags that name 400 documents."""
    prefix = tmp_path_factory.mktemp("padded") / "corpus"
    write_documents(prefix, 400)
    return f"--data-path {prefix} --split 80,10,10"


@pytest.fixture(scope="module")
def few(padded_data, tmp_path_factory) -> str:
    """Return flags that name the same for training and two validation sets of 1 and 3 samples."""
    folder = tmp_path_factory.mktemp("few")
    for name, number in (("one", 1), ("three", 3)):
        write_documents(folder / name, number)
    train = padded_data.split()[1]
    names = f"--valid-data-path {folder / 'one'} {folder / 'three'}"
    return f"--train-data-path {train} {names} --full-validation --multiple-validation-sets"


@pytest.fixture(scope="module")
def one_rank(padded_data, tmp_path_factory):
    """Train on one rank; return flags that go on after iteration 1, and what it measured."""
    made = {}

    def run(more: str) -> tuple[str, list[dict[str, float]]]:
        if more not in made:
            folder = tmp_path_factory.mktemp("one_rank") / "run"
            data = "" if "--train-data-path" in more else padded_data
            flags = f"{EXACT} {data} {more} --null-tokenizer-pad-id {PAD} {TIGHT}"
            flags += " --disable-bias-linear"
            trained(f"{flags} --switch-run-dir {folder}")
            load = f"--load {folder / 'checkpoints'} --ckpt-step 1"
            made[more] = f"{flags} {load}", measured(folder / "metrics.jsonl")
        return made[more]

    return run


def measured(path: Path) -> list[dict[str, float]]:
    """Return what a run measured after its first iteration, evaluations too."""
    kinds = ("train", "validation", "validation-0", "validation-1", "test")
    records = [record for kind in kinds for record in read_records(path, kind)]
    return [
        {name: record[name] for name in ("iteration", *COUNTED) if name in record}
        for record in records
        if record["iteration"] > 1
    ]


@pytest.mark.parametrize(
    ("ranks", "layout", "more"),
    [
        (4, f"{TP2} --pipeline-model-parallel-size 2", ""),
        (4, f"--pipeline-model-parallel-size 2 {EP2}", "--switch-capacity-group sequence"),
        (
            4,
            "--pipeline-model-parallel-size 4",
            "--reset-attention-mask --reset-position-ids --moe-layer-freq [0,1,0,0]",
        ),
        (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", ""),
    ],
    ids=["TP2 PP2", "PP2 EP2, by sequence", "PP4, packed documents", "PP2 VP2"],
)
def test_padding_is_the_same_in_every_layout(one_rank, tmp_path, ranks, layout, more):
    flags, expected = one_rank(more)
    trained(f"{flags} {layout} --switch-metrics-file {tmp_path / 'metrics'}", ranks=ranks)
    actual = measured(tmp_path / "metrics")
    assert len(actual) == len(expected) == 3 + 3 + 1  # steps, validations, test
    assert any(record["dropped_fraction"] > 0 for record in expected)
    for record, wanted in zip(actual, expected, strict=True):
        assert record == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "layout"), [(4, EP2), (2, TP2), (2, "--pipeline-model-parallel-size 2")]
)
def test_a_validation_set_with_fewer_samples_than_ranks(one_rank, few, tmp_path, ranks, layout):
    """Three samples: of four data ranks one has none, and takes part with a sample of nothing."""
    flags, expected = one_rank(few)
    trained(f"{flags} {layout} --switch-metrics-file {tmp_path / 'metrics'}", ranks=ranks)
    actual = measured(tmp_path / "metrics")
    assert [set(record) for record in actual] == [set(record) for record in expected]
    for record, wanted in zip(actual, expected, strict=True):
        assert record["lm_loss"] == pytest.approx(wanted["lm_loss"], rel=1e-5)
