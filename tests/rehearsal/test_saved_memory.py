"""What a launch keeps elsewhere than on a rank's device: on the host, or on the other ranks.

Each way is rehearsed with and without: what it saves is what its bytes say, the messages and the
arithmetic of a step are otherwise the same, and the planner predicts it within 5 %.
"""

import shlex

import pytest
from support.observed_run import rehearsed

from megatron_switch.architecture.model_flags import capacity_of, model_from_flags
from megatron_switch.flags.argv import flags_of_argv
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Training
from megatron_switch.planner.cost.memory import predict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MODEL = (
    "--num-layers 4 --hidden-size 512 --ffn-hidden-size 2048 --num-attention-heads 8 "
    "--seq-length 512 --max-position-embeddings 512 --vocab-size 8192 --position-embedding-type "
    "rope --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --bf16 "
    "--tokenizer-type NullTokenizer --mock-data --train-iters 10 --lr 1e-3 --clip-grad 1e-4 "
    "--micro-batch-size 2 --global-batch-size 32 --num-experts 8 --use-distributed-optimizer"
)
EP4 = "--expert-model-parallel-size 4"
SHARDED = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format "
    "fsdp_dtensor --megatron-fsdp-main-grads-dtype fp32 --overlap-grad-reduce "
    "--overlap-param-gather"
)
ON_HOST = "--optimizer-cpu-offload --use-precision-aware-optimizer"
OFFLOADED = (
    "--fine-grained-activation-offloading --offload-modules qkv_linear core_attn attn_proj "
    "--min-offloaded-tensor-size 1024"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def rank_0(flags, world_size=8):
    (report,) = rehearsed(f"{MODEL} {flags}", world_size=world_size)
    return report


def predicted(flags, layout, **training):
    values = flags_of_argv(shlex.split(f"{MODEL} {flags}"))
    common = {
        "seq_length": 512,
        "micro_batch_size": 2,
        "global_batch_size": 32,
        "capacity": capacity_of(values),
        "device": "cpu",
        "rotary": True,
        "recompute": "full" if "recompute-granularity" in values else "none",
    }
    return predict(model_from_flags(values), layout, Training(**common, **training))


def calls(report):
    return [(call.kind, call.members, call.num_bytes) for call in report.calls]


def test_an_optimizer_on_the_host_leaves_the_device_and_is_where_it_was_predicted():
    here, there = rank_0(EP4), rank_0(f"{EP4} {ON_HOST}")
    moved = sum(here.state_bytes[f"{part} optimizer"] for part in ("dense", "expert"))
    left = sum(there.state_bytes[f"{part} optimizer"] for part in ("dense", "expert"))
    assert here.host_bytes == 0
    assert left < 1000  # a count of steps for each tensor
    assert there.host_bytes == pytest.approx(moved * 16 / 12, rel=1e-3)  # gradients are there too
    assert here.peak - there.peak == pytest.approx(moved - left, rel=1e-3)
    assert calls(there) == calls(here)
    memory = predicted(EP4, Layout(8, ep=4), offload_optimizer=True)
    assert memory.host == pytest.approx(there.host_bytes, rel=0.01)
    assert memory.total == pytest.approx(there.peak, rel=0.05)


def test_masters_stay_on_the_device_without_the_optimizer_that_knows_of_precision():
    there = rank_0(f"{EP4} --optimizer-cpu-offload")
    owned = {"dense": there.parameters["dense"] / 8, "expert": there.parameters["expert"] / 2}
    for part, number in owned.items():
        assert there.state_bytes[f"{part} optimizer"] == pytest.approx(4 * number, rel=1e-3)


def test_activations_on_the_host_are_those_of_attention_and_come_back():
    here, there = rank_0(EP4), rank_0(f"{EP4} {OFFLOADED}")
    assert there.state_bytes == here.state_bytes
    assert calls(there) == calls(here)
    assert (there.forward_flops, there.backward_flops) == (here.forward_flops, here.backward_flops)
    saved = here.peak_bytes["activations"] - there.peak_bytes["activations"]
    # Of a layer: what projections read, queries, keys, values and context; in bf16. The last layer
    # that is offloaded would come back at once, and stays.
    tokens, width = 2 * 512, 512
    most = 4 * tokens * (2 * width + 4 * width) * 2
    assert most / 2 < saved < most
    assert there.host_bytes >= saved
    assert there.peak < here.peak


def test_a_smaller_share_of_activations_saves_less():
    whole = rank_0(f"{EP4} {OFFLOADED}")
    half = rank_0(f"{EP4} {OFFLOADED} --activation-offload-fraction 0.5")
    assert 0 < half.host_bytes <= whole.host_bytes
    assert whole.peak_bytes["activations"] < half.peak_bytes["activations"]


CUT = {
    "ep": (EP4, {"world_size": 8, "ep": 4}),
    "recompute": (f"{EP4} {FULL}", {"world_size": 8, "ep": 4}),
    "tp": (
        f"{EP4} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        {"world_size": 16, "tp": 2, "ep": 4, "etp": 1},
    ),
    # One expert on a rank and eight copies of it: its two matrices are not cut any further.
    "one expert": (
        "--expert-model-parallel-size 8",
        {"world_size": 64, "ep": 8},
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_cut_over_ranks_is_predicted(name):
    flags, sizes = CUT[name]
    flags = f"{flags} --global-batch-size {4 * sizes['world_size']}"
    report = rank_0(f"{flags} {SHARDED}", sizes["world_size"])
    memory = predicted(flags, Layout(**sizes), sharding="fully_sharded")
    state = report.state_bytes
    for kind in ("weights", "gradients", "optimizer"):
        found = state[f"dense {kind}"] + state[f"expert {kind}"]
        expected = getattr(memory.dense, kind) + getattr(memory.expert, kind)
        assert expected == pytest.approx(found, rel=0.02), kind
    assert report.peak_bytes["gathered"] > 0
    kinds = {call.kind for call in report.calls if len(call.members) == sizes["world_size"]}
    assert {"all-gather", "reduce-scatter"} & kinds or "tp" in name
    assert memory.total == pytest.approx(report.peak, rel=0.07 if name == "one expert" else 0.05)
