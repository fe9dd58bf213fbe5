"""``megatron-switch plan``: the layouts in which a model trains fastest on a cluster.

    megatron-switch plan --model gpt-1.6t-128 --hardware a100-80gb-hdr --nodes 128
    megatron-switch plan --hardware h100-80gb-ndr --nodes 8 -- PRETRAIN FLAGS

Nothing heavy is imported: it answers at once on a login node without a GPU.
"""

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_switch.architecture.model_flags import model_names
from megatron_switch.commands.plan_report import PlanReport
from megatron_switch.errors import ConfigError
from megatron_switch.flags.values import FlagValues
from megatron_switch.layout.grid import Layout
from megatron_switch.layout.workload import Slots
from megatron_switch.planner.given_run import given_run
from megatron_switch.planner.grid_product import GridProduct, nearest_that_fit, states_by_sharding
from megatron_switch.planner.hardware.cluster import (
    Hardware,
    hardware_as_json,
    load_hardware,
    preset_names,
)
from megatron_switch.planner.hardware.link_fit import fitted_hardware, fitted_step
from megatron_switch.planner.hardware.nccl_output import read_runs
from megatron_switch.planner.hardware.node_order import order_nodes, read_topology, whole_blocks
from megatron_switch.planner.layout_plan import LayoutPlan, best_plan, evaluate
from megatron_switch.planner.plan_file import plans_as_json
from megatron_switch.planner.plan_flags import plan_flags
from megatron_switch.planner.planned_model import PlannedModel, planned_model
from megatron_switch.planner.request import PlanRequest
from megatron_switch.planner.search import BestPlans, find_plans
from megatron_switch.utils.argument_types import count, output_file, tokens
from megatron_switch.utils.atomic_file import write_output

_FACTORS = (1.0, 1.1, 1.2, 1.25, 1.3, 1.4, 1.5, 1.75, 2.0)
_BATCH_TOKENS = 2**20  # as in the Switch paper
_WIDE = 200
_AS_GIVEN = 0
"""``--explain`` without a number."""


def run(args: Namespace) -> int:
    """Plan, print, and return the exit code.

    Raises:
        SwitchError: If nothing can be planned; the message says what would help.
    """
    _check_options(args)
    model = planned_model(args.model, args.train_flags)
    hardware = _hardware(args)
    if args.grid is not None:
        form = GridProduct.parse(args.grid)
        args.nodes = args.nodes or max(1, form.world_size // hardware.gpus_per_node)
    request = _request(args, model, hardware)
    if args.measured_step is not None:
        request = _with_measured_step(request, args.measured_step)
    if args.write_hardware is not None:
        text = json.dumps(hardware_as_json(request.hardware), indent=2)
        write_output(args.write_hardware, text + "\n")
    console = Console(width=None if sys.stdout.isatty() else _WIDE, soft_wrap=True)
    report = PlanReport(console, request, model.argv)
    if args.grid is not None:
        return _answer_grid(form, request, report, model)
    if args.explain == _AS_GIVEN and args.train_flags:
        return _explain_given(console, request, model, args.global_batch_size)
    plans = find_plans(request, count=args.count)
    first = plans.best[0]
    not_kept = model.not_kept(plan_flags(first.layout, first.training))
    if args.json:
        record = plans_as_json(plans.best, request, model.argv)
        print(json.dumps(record | {"not_kept": not_kept}, indent=2))
        return 0
    report.head(model.name)
    if args.explain is not None:
        report.explained(_numbered(plans, args.explain or 1))
    elif args.sweep_capacity:
        report.capacity_sweep(_sweep(plans.best[0], request))
        report.caveat()
    else:
        report.best(plans)
    report.not_kept(not_kept)
    if args.topology is not None:
        _place(args, plans.best[0], request, report)
    return 0


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's own flags; those of the training stand after ``--``."""
    parser.description = (
        "Enumerate every legal layout of a model on a cluster, and show the fastest that fit."
    )
    parser.epilog = (
        "Pretrain flags after -- describe the model instead of --model, or change it; "
        "parallel sizes and micro-batch among them are kept as given."
    )
    parser.add_argument(
        "--model", help=f"{', '.join(model_names())}, or a JSON file of flags", metavar="NAME"
    )
    parser.add_argument(
        "--hardware",
        default="a100-80gb-hdr",
        help=f"{', '.join(preset_names())}, or a JSON file (default: %(default)s)",
        metavar="NAME",
    )
    parser.add_argument("--nodes", type=count, metavar="N", help="nodes (default: 1)")
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help="default: as --hardware")
    parser.add_argument(
        "--global-batch-size",
        type=count,
        metavar="N",
        help="sequences of a step (default: 2^20 tokens, and no fewer than there are GPUs)",
    )
    parser.add_argument("--count", type=count, default=5, metavar="N", help="layouts to show")
    parser.add_argument(
        "--transformer-engine",
        action="store_true",
        help="modules are Transformer Engine's (allows context parallelism)",
    )
    parser.add_argument(
        "--no-fully-sharded", action="store_true", help="leave Megatron-FSDP out of account"
    )
    parser.add_argument(
        "--no-offload", action="store_true", help="keep the optimizer on the GPUs in any case"
    )
    parser.add_argument(
        "--explain",
        type=count,
        nargs="?",
        const=_AS_GIVEN,
        metavar="N",
        help="show layout N line by line, with formulas; without N, the run of the pretrain flags "
        "exactly as given, or layout 1 where there are none",
    )
    parser.add_argument(
        "--train-tokens",
        type=tokens,
        metavar="N",
        help="tokens of the whole training (300e9, 300B), for its days and GPU hours (default: as "
        "--train-iters or --train-samples among the pretrain flags)",
    )
    parser.add_argument("--sweep-capacity", action="store_true", help="table of capacity factors")
    parser.add_argument(
        "--grid", metavar="32x4x8", help="answer a data x model x expert layout literally"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--fit",
        action="append",
        metavar="FILE",
        help="nccl-tests output to fit the links to: what they print, or the JSON of their -J; may "
        "be repeated",
    )
    parser.add_argument(
        "--measured-step", type=float, metavar="S", help="seconds of a step of the first layout"
    )
    parser.add_argument(
        "--write-hardware", type=output_file, metavar="FILE", help="write the fitted hardware file"
    )
    parser.add_argument(
        "--topology",
        metavar="FILE",
        help="SLURM's topology.conf: order its nodes so that expert groups stay under a leaf",
    )
    parser.add_argument(
        "--write-hostfile",
        type=output_file,
        metavar="FILE",
        help="write that order, for SLURM_HOSTFILE",
    )


def _check_options(args: Namespace) -> None:
    if args.write_hostfile is not None and args.topology is None:
        raise ConfigError("--write-hostfile writes the order of --topology's nodes: give both.")
    if args.json and (args.explain is not None or args.sweep_capacity):
        raise ConfigError("--json prints plans: leave out --explain and --sweep-capacity.")
    step = args.measured_step
    if step is not None and not 0 < step < math.inf:
        raise ConfigError(f"--measured-step takes seconds above 0, got {step}.")


def _hardware(args: Namespace) -> Hardware:
    hardware = load_hardware(args.hardware, gpus_per_node=args.gpus_per_node)
    if args.fit is not None:
        runs = [run for path in args.fit for run in read_runs(Path(path))]
        hardware = fitted_hardware(hardware, runs)
    return hardware


def _request(args: Namespace, model: PlannedModel, hardware: Hardware) -> PlanRequest:
    nodes = args.nodes or 1
    ranks = nodes * hardware.gpus_per_node
    batch = args.global_batch_size or model.global_batch_size
    if batch is None:
        batch = max(_BATCH_TOKENS // model.training.seq_length, ranks)
    training = replace(
        model.training,
        global_batch_size=batch,
        transformer_engine=args.transformer_engine or model.training.transformer_engine,
    )
    return PlanRequest(
        model=model.model,
        training=training,
        hardware=hardware,
        nodes=nodes,
        shardings=("distributed",) if args.no_fully_sharded else ("distributed", "fully_sharded"),
        offloads=(False,) if args.no_offload else (False, True),
        dispatches=model.dispatches,
        fixed=model.fixed,
        train_tokens=args.train_tokens or model.train_tokens,
    )


def _explain_given(
    console: Console, request: PlanRequest, model: PlannedModel, batch_size: int | None
) -> int:
    layout, training = given_run(request, FlagValues(model.flags), global_batch_size=batch_size)
    batch = replace(request.training, global_batch_size=training.global_batch_size)
    request = replace(request, training=batch)
    report = PlanReport(console, request, model.argv)
    report.head(model.name)
    report.as_given(evaluate(request, layout, training))
    return 0


def _with_measured_step(request: PlanRequest, measured: float) -> PlanRequest:
    predicted = find_plans(request, count=1).best[0].timing.step
    return replace(
        request, hardware=fitted_step(request.hardware, measured=measured, predicted=predicted)
    )


def _numbered(plans: BestPlans, number: int) -> LayoutPlan:
    if number > len(plans.best):
        raise ConfigError(
            f"--explain {number} asks for a layout that is not among the {len(plans.best)} shown. "
            "Raise --count."
        )
    return plans.best[number - 1]


def _sweep(plan: LayoutPlan, request: PlanRequest) -> list[tuple[float, int, LayoutPlan]]:
    rows = []
    for factor in _FACTORS:
        capacity = replace(plan.training.capacity, factor=factor, slots=None)
        training = replace(plan.training, capacity=capacity)
        slots = Slots.of(request.model.num_experts, plan.layout, training)
        rows.append((factor, slots.capacity, evaluate(request, plan.layout, training)))
    return rows


def _answer_grid(
    form: GridProduct, request: PlanRequest, report: PlanReport, model: PlannedModel
) -> int:
    layout = form.layout()
    if layout.world_size != request.world_size:
        raise ConfigError(
            f"--grid {form.data}x{form.model}x{form.experts} is {layout.world_size} ranks, but "
            f"{request.nodes} nodes x {request.hardware.gpus_per_node} GPUs are "
            f"{request.world_size}. Change --nodes or --gpus-per-node."
        )
    report.head(model.name)
    report.grid(
        form,
        _as_asked(request, layout),
        states_by_sharding(request, layout, request.training),
        nearest_that_fit(request, layout),
    )
    return 0


def _as_asked(request: PlanRequest, layout: Layout) -> LayoutPlan:
    """Return the cheapest way to train in a layout that fits; else the fully sharded one."""
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "etp")}
    exact = replace(request, fixed={**request.fixed, **sizes})
    for legal in exact.legal_sizes():
        plan = best_plan(exact, legal)
        if plan is not None:
            return plan
    training = replace(request.training, sharding="fully_sharded", sequence_parallel=layout.tp > 1)
    return evaluate(request, layout, training)


def _place(args: Namespace, plan: LayoutPlan, request: PlanRequest, report: PlanReport) -> None:
    leaf_of = read_topology(Path(args.topology))
    if len(leaf_of) != request.nodes:
        raise ConfigError(
            f"{args.topology} names {len(leaf_of)} nodes and the plan is for {request.nodes}. "
            "Give the lines of the job's nodes only, or change --nodes."
        )
    spread = request.hardware.expert_spread(plan.layout)
    placement = order_nodes(leaf_of, spread.nodes)
    report.placement(placement, before=whole_blocks(leaf_of, spread.nodes))
    if args.write_hostfile is not None:
        names = [node for node in placement.nodes for _ in range(request.hardware.gpus_per_node)]
        write_output(args.write_hostfile, "\n".join(names) + "\n")
