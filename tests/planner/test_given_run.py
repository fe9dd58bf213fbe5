"""The run of some flags is the one that the training command starts with them."""

import pytest

from megatron_switch.config import SwitchConfig
from megatron_switch.errors import ConfigError, LayoutError
from megatron_switch.flags.values import FlagValues
from megatron_switch.planner.given_run import given_run
from megatron_switch.planner.hardware.cluster import load_hardware
from megatron_switch.planner.planned_model import planned_model
from megatron_switch.planner.request import PlanRequest
from megatron_switch.training.arguments.parser import parse_command_line
from megatron_switch.training.loop.gpt_builder import resolve_dispatch
from megatron_switch.training.preflight.layout import check_layout

MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
    "--max-position-embeddings 256 --vocab-size 1000 --num-experts 8 --disable-bias-linear "
    "--lr 1e-3"
)
RANKS = 16


def run_of(flags):
    model = planned_model(None, f"{MODEL} {flags}".split())
    request = PlanRequest(
        model=model.model,
        training=model.training,
        hardware=load_hardware("h100-80gb-ndr"),
        nodes=RANKS // 8,
    )
    return given_run(request, FlagValues(model.flags))


@pytest.mark.parametrize(
    "flags",
    [
        "--micro-batch-size 2",
        "--micro-batch-size 2 --global-batch-size 64 --bf16 --expert-model-parallel-size 8",
        "--micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--global-batch-size 32 --fp16 --use-distributed-optimizer --switch-dispatch packed",
        "--micro-batch-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1 --expert-model-parallel-size 4 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        "--micro-batch-size 2 --recompute-granularity selective --recompute-modules moe "
        "--switch-capacity-group ep",
        "--micro-batch-size 2 --switch-recipe megatron",
    ],
)
def test_it_is_what_the_training_command_starts(monkeypatch, flags):
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    args = parse_command_line(f"{MODEL} {flags}".split()).args
    args.moe_layer_freq = [0, 1] * 4
    switch = resolve_dispatch(args, SwitchConfig.from_args(args), "cuda")
    layout, training = run_of(flags)
    assert layout == check_layout(args, switch)
    assert training.micro_batch_size == args.micro_batch_size
    # Megatron's validation makes the default batch one micro-batch of each replica.
    assert training.global_batch_size == (
        args.global_batch_size or args.micro_batch_size * layout.dp
    )
    assert training.precision == ("bf16" if args.bf16 else "fp16" if args.fp16 else "fp32")
    assert training.sequence_parallel == args.sequence_parallel
    assert training.dispatch == switch.dispatch
    assert (training.sharding == "distributed") == args.use_distributed_optimizer
    assert training.recompute == (args.recompute_granularity or "none")
    if args.recompute_modules:
        assert list(training.recompute_modules) == args.recompute_modules
    if args.recompute_num_layers:
        assert training.recompute_layers == args.recompute_num_layers
    factor = args.moe_expert_capacity_factor
    assert training.capacity.factor == factor
    assert (training.capacity.least, training.capacity.rounding, training.capacity.group) == (
        switch.min_capacity,
        switch.capacity_rounding,
        switch.capacity_group,
    )


def test_what_the_training_command_would_refuse_is_refused():
    with pytest.raises(LayoutError, match="--tensor-model-parallel-size"):
        run_of("--tensor-model-parallel-size 3")
    with pytest.raises(ConfigError, match="--recompute-granularity is selective or full, got some"):
        run_of("--recompute-granularity some")
    with pytest.raises(ConfigError, match=r"--switch-recipe is one of switch, .*, got mine"):
        run_of("--switch-recipe mine")
