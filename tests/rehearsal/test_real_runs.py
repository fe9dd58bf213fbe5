"""A rehearsal says and needs what a real run does: collectives call for call, and memory."""

import pytest
from support.observed_run import SPARSE, TINY, observed, rehearsed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PADDED = f"{SPARSE} --switch-dispatch padded"
EVERYTHING = (
    "--bf16 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather"
)
INTERLEAVED = (
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--expert-model-parallel-size 4 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --switch-capacity-group sequence"
)


@pytest.mark.parametrize("layout", [EVERYTHING, INTERLEAVED], ids=["tp-pp-ep-dp", "vp-ep"])
def test_every_collective_of_eight_ranks_is_rehearsed(layout):
    flags = f"{PADDED} {layout}"
    real = observed(flags, world_size=8)
    ranks = [0, 3, 6, 7]  # both stages, and several places on every other axis
    kinds = set()
    for report in rehearsed(flags, world_size=8, ranks=ranks):
        assert report.calls == real[report.rank].calls
        assert report.collectives == real[report.rank].collectives
        assert report.groups == real[report.rank].groups
        kinds |= {call.kind for call in report.calls}
        if "overlap-param-gather" in layout:  # as steps do after the first one
            gathered = {call.group for call in report.calls if call.kind == "all-gather"}
            assert {"dp_cp", "edp"} <= gathered
    assert {"all-to-all", "all-reduce", "send", "receive"} <= kinds


@pytest.mark.parametrize(
    "flags",
    [
        TINY,
        PADDED,
        f"{PADDED} --bf16 --use-distributed-optimizer --normalization RMSNorm --swiglu",
        f"{PADDED} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 2",
    ],
    ids=["dense", "padded", "bf16-gated", "recompute"],
)
def test_memory_and_operations_are_those_of_a_real_rank(flags):
    wide = f"{flags} --hidden-size 64 --seq-length 64 --max-position-embeddings 64"
    (real,) = observed(wide)
    (report,) = rehearsed(wide)
    assert report.state_bytes == real.state_bytes
    assert report.parameters == real.parameters
    assert report.forward_flops == real.forward_flops
    assert report.backward_flops == real.backward_flops
    assert report.peak == pytest.approx(real.peak, rel=0.01)
    for kind in ("activations", "backward"):
        assert report.peak_bytes[kind] == pytest.approx(
            real.peak_bytes[kind], rel=0.02, abs=0.002 * real.peak
        )


def test_an_encoder_decoder_is_rehearsed_too():
    flags = (
        f"{PADDED} --switch-arch t5 --decoder-seq-length 8 --tensor-model-parallel-size 2 "
        "--sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    )
    real = observed(flags, world_size=2)
    for report in rehearsed(flags, world_size=2, ranks=[0, 1]):
        assert report.calls == real[report.rank].calls
        assert report.state_bytes == real[report.rank].state_bytes
        assert report.peak == pytest.approx(real[report.rank].peak, rel=0.05)
