"""Time in which experts' products wait for their own weights.

A product of few rows does little with each weight that it reads: with 32 rows an expert it makes 64
operations of a bf16 weight, where an H100 makes 295 in the time in which its memory delivers 2
bytes. Forward and backward read the weights of a rank's experts once each, and the weights'
gradients are added to those of earlier micro-batches, which reads and writes them. Where that takes
longer than the products, the difference is this time. It is why many experts on a rank with small
micro-batches are slow although nothing is sent.

Memory is taken at its full bandwidth, and rows are not counted as traffic, so it is the least.
"""

from megatron_switch.architecture.model import Architecture
from megatron_switch.architecture.parameters import experts_of_layer
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training
from megatron_switch.planner.cost.activations import rows_of_experts
from megatron_switch.planner.hardware.cluster import Hardware


def rows_of_one_expert(model: Architecture, layout: Layout, training: Training) -> float:
    """Return the rows that one expert computes in a micro-batch, the mean over a rank's experts."""
    return rows_of_experts(model, layout, training) * layout.ep / model.num_experts


def seconds_of_weights(
    model: Architecture, layout: Layout, training: Training, hardware: Hardware
) -> float:
    """Return the time that one sparse layer waits for weights in a micro-batch, beside products.

    Args:
        model: A model with experts.
        layout: The ranks.
        training: Batch, precision, recompute.
        hardware: Its arithmetic, and the bandwidth of a GPU's memory.
    """
    weights = experts_of_layer(model, layout)
    product = 2 * weights * rows_of_one_expert(model, layout, training) / hardware.flops
    bandwidth = hardware.hbm_gb_s * 1e9
    reading = weights * training.width / bandwidth
    adding = 2 * weights * (4 if training.fp32_gradients else training.width) / bandwidth
    again = training.recompute == "full" or training.recomputes("moe")
    reads = 3 if again else 2  # forward, backward of the rows, forward once more
    return reads * max(0.0, reading - product) + max(0.0, adding - product)
