"""The tutorials' product of data, model and expert ranks."""

import pytest

from megatron_switch.architecture.model_flags import model_from_flags, read_model
from megatron_switch.errors import LayoutError
from megatron_switch.layout.workload import Training
from megatron_switch.planner.grid_product import GridProduct, nearest_that_fit, states_by_sharding
from megatron_switch.planner.hardware.cluster import load_hardware
from megatron_switch.planner.request import PlanRequest


@pytest.fixture(scope="module")
def request_1024():
    return PlanRequest(
        model=model_from_flags(read_model("gpt-1.6t-128")),
        training=Training(seq_length=2048, global_batch_size=2048),
        hardware=load_hardware("a100-80gb-hdr"),
        nodes=128,
    )


@pytest.mark.parametrize("text", ["32x4x8", "32 x 4 x 8", "32X4X8", "32*4*8"])
def test_a_product_means_two_grids(text):
    form = GridProduct.parse(text)
    layout = form.layout()
    assert form.world_size == layout.world_size == 1024
    assert (layout.tp, layout.dp, layout.pp, layout.cp) == (4, 256, 1, 1)
    assert (layout.etp, layout.ep, layout.edp) == (4, 8, 32)


@pytest.mark.parametrize("text", ["32x4", "32x4x0", "axbxc", "32x4x8x2", ""])
def test_what_is_no_product(text):
    with pytest.raises(LayoutError, match=r"--grid is data x model x expert ranks"):
        GridProduct.parse(text)


def test_the_popular_example_fits_only_fully_sharded(request_1024):
    layout = GridProduct(32, 4, 8).layout()
    states = states_by_sharding(request_1024, layout, request_1024.training)
    totals = {name: s.expert.total + s.dense.total for name, s in states.items()}
    assert states["distributed"].expert.total / 1e9 == pytest.approx(328.6, rel=1e-3)
    assert totals["fully_sharded"] / 1e9 == pytest.approx(29.45, rel=1e-3)
    fits = {name for name, total in totals.items() if total <= request_1024.hardware.budget}
    assert fits == {"fully_sharded"}


def test_nearest_layouts_fit_with_the_distributed_optimizer_alone(request_1024):
    near = nearest_that_fit(request_1024, GridProduct(32, 4, 8).layout())
    assert len(near) == 3
    for plan in near:
        layout = plan.layout
        assert plan.training.sharding == "distributed"
        assert not plan.training.offload_optimizer
        assert plan.memory.total <= request_1024.hardware.budget
        # By hand: 6 P / M + 12 P / N <= 83 GB needs M >= 155, so 256 of powers of two.
        assert layout.ep * layout.etp * layout.pp >= 256
