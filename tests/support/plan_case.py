"""A model on 16 nodes, and the plan of any of its layouts."""

from megatron_switch.architecture.layer_pattern import Stack
from megatron_switch.architecture.model import Architecture
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training
from megatron_switch.planner.hardware.cluster import load_hardware
from megatron_switch.planner.layout_plan import LayoutPlan, evaluate
from megatron_switch.planner.request import PlanRequest

MODEL = Architecture(
    decoder=Stack(8, (1, 3, 5, 7)),
    hidden_size=1024,
    num_attention_heads=16,
    ffn_hidden_size=4096,
    padded_vocab_size=32768,
    num_experts=64,
)
TRAINING = Training(seq_length=1024, global_batch_size=8192, micro_batch_size=2)
REQUEST = PlanRequest(
    model=MODEL, training=TRAINING, hardware=load_hardware("a100-80gb-hdr"), nodes=16
)


def plan_of(
    training: Training = TRAINING, request: PlanRequest = REQUEST, **sizes: int
) -> LayoutPlan:
    """Return the plan of a layout of 128 ranks, whether it fits or not."""
    return evaluate(request, Layout(128, **sizes), training)
