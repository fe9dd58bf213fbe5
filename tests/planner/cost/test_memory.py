"""Memory by part: which parts meet at a peak, on which stage, and for how many micro-batches.

That a real step has as much alive is shown in ``tests/planner/cost/test_planned_memory.py``.
"""

from dataclasses import replace

import pytest
from support.planned_model import MODEL, TRAINING

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training
from megatron_switch.planner.cost.memory import MemoryByPart, predict, predict_peak
from megatron_switch.planner.cost.state import StateBytes


def test_a_pass_and_a_step_are_never_at_the_same_time():
    state = StateBytes(1, 2, 3)
    one = {"activations": 10, "routing": 5, "buffers": 7, "logits": 9}
    assert MemoryByPart(state, state, **one).total == 12 + 10 + 5 + 9
    assert MemoryByPart(state, state, **one, step=100).total == 12 + 100
    assert MemoryByPart(state, state, **one, step=100).peaks_in_the_step
    assert not MemoryByPart(state, state, **one, step=24).peaks_in_the_step
    assert MemoryByPart(state, state, **one, host=100).total == 12 + 10 + 5 + 9
    assert sum(MemoryByPart(state, state, **one).parts().values()) == 12 + 10 + 5 + 9 + 7


def test_the_fullest_stage_is_found_where_sparse_layers_are_uneven():
    # Stages of three layers: the second of four holds two of the sparse ones, the first one.
    model = replace(MODEL, decoder=Stack.switch(12), moe_ffn_hidden_size=8192)
    layout = Layout(8, pp=4, ep=2)
    training = Training(**(TRAINING | {"global_batch_size": 64}))
    stage, memory = predict_peak(model, layout, training)
    assert stage == 1
    assert memory.total == max(
        predict(model, layout, training, stage=number).total for number in range(4)
    )


@pytest.mark.parametrize(
    ("vp", "micro_batches", "stage", "chunks"), [(1, 8, 0, 4), (1, 2, 0, 2), (1, 8, 3, 1)]
)
def test_a_stage_keeps_as_many_micro_batches_as_stages_follow(vp, micro_batches, stage, chunks):
    model = replace(MODEL, decoder=Stack(8), num_experts=0)
    layout = Layout(4, pp=4, vp=vp)
    many = Training(**(TRAINING | {"global_batch_size": 4 * micro_batches}))
    single = Training(**(TRAINING | {"global_batch_size": 4}))
    one = predict(model, Layout(4, pp=4), single, stage=stage).activations
    assert predict(model, layout, many, stage=stage).activations == chunks * one
