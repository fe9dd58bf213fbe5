"""Unmodified ``pretrain`` trains in every kind of layout, and layouts agree where they must.

Weights are drawn by name and data by index, so the lm loss of each of the three iterations is one
number for all layouts; the second and third also depend on every gradient and on the optimizer.
No compiler can be found: the emulation must not need one.
"""

import pytest
import torch
from support.stock_pretrain import MOE_FLAGS, losses_of, train

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EP2 = "--expert-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
DISTRIBUTED_OPTIMIZER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
DENSE = "--num-layers 4"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Losses of one rank, by flags, each computed once."""
    known = {}

    def losses(flags):
        if flags not in known:
            known[flags] = losses_of(train(1, flags, tmp_path_factory.mktemp("one")))
        return known[flags]

    return losses


def assert_losses_close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=tolerance, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(4, TP2, id="tp2-dp2"),
        pytest.param(4, f"{PP2} {DISTRIBUTED_OPTIMIZER}", id="pp2-dp2-distributed-optimizer"),
        pytest.param(2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1", id="pp2-interleaved"),
    ],
)
def test_dense_layouts_agree(num_ranks, layout, one_rank, tmp_path):
    losses = losses_of(train(num_ranks, f"{DENSE} {layout}", tmp_path))
    assert_losses_close(losses, one_rank(DENSE))
    assert losses[2] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(
            4,
            f"{TP2} {EP2} --expert-tensor-parallel-size 1 {PP2} {DISTRIBUTED_OPTIMIZER}",
            id="tp2-ep2-pp2-distributed-optimizer",
        ),
        pytest.param(4, f"{TP2} {EP2} --expert-tensor-parallel-size 2", id="tp2-ep2-etp2"),
        pytest.param(
            2,
            f"{EP2} --recompute-granularity selective --recompute-modules moe core_attn",
            id="ep2-selective-recompute",
        ),
        pytest.param(1, FULL_RECOMPUTE, id="full-recompute"),
    ],
)
def test_mixture_of_experts_layouts_agree(num_ranks, layout, one_rank, tmp_path):
    losses = losses_of(train(num_ranks, f"{MOE_FLAGS} {layout}", tmp_path))
    assert_losses_close(losses, one_rank(MOE_FLAGS))


@pytest.mark.slow
def test_recompute_draws_the_same_dropout_again(one_rank):
    flags = f"{MOE_FLAGS} {DROPOUT}"
    recomputed = one_rank(f"{flags} {FULL_RECOMPUTE}")
    assert recomputed == one_rank(flags)
    assert recomputed != one_rank(MOE_FLAGS)


@pytest.mark.slow
def test_bfloat16_stays_near_float32(one_rank, tmp_path):
    flags = f"{MOE_FLAGS} --bf16 {EP2} {DISTRIBUTED_OPTIMIZER}"
    losses = losses_of(train(2, flags, tmp_path))
    assert_losses_close(losses, one_rank(MOE_FLAGS), tolerance=2e-3)
    assert losses != one_rank(MOE_FLAGS)


@pytest.mark.slow
def test_float16_halves_its_loss_scale_until_the_gradients_fit(one_rank, tmp_path):
    scale = 2.0**40
    flags = f"{MOE_FLAGS} --fp16 --initial-loss-scale {int(scale)} --hysteresis 1 {EP2}"
    records = train(2, f"{flags} --train-iters 3", tmp_path)
    assert_losses_close(losses_of(records)[:1], one_rank(MOE_FLAGS)[:1], tolerance=1e-3)
    per_iteration = torch.tensor(records[0].loss_scales).view(3, -1)
    assert per_iteration.unique(dim=1).shape == (3, 1)
    assert per_iteration[:, 0].tolist() == [scale, scale / 2, scale / 4]  # all three skipped
