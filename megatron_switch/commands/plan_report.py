"""Plans on a screen: tables of the best layouts, reasons, warnings and ready flags."""

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_switch.architecture.parameters import active_parameters, total_parameters
from megatron_switch.layout.workload import Sharding
from megatron_switch.planner.bottleneck import bottleneck, why_faster
from megatron_switch.planner.cost.state import RankState
from megatron_switch.planner.explanation import explain
from megatron_switch.planner.grid_product import GridProduct
from megatron_switch.planner.hardware.node_order import NodeOrder
from megatron_switch.planner.layout_plan import LayoutPlan
from megatron_switch.planner.plan_flags import plan_flags
from megatron_switch.planner.plan_warnings import plan_warnings
from megatron_switch.planner.request import PlanRequest
from megatron_switch.planner.search import BestPlans
from megatron_switch.utils.units import gigabytes

_SHARDING = {
    "replicated": "optimizer state on every copy",
    "distributed": "distributed optimizer",
    "fully_sharded": "fully sharded (Megatron-FSDP)",
}


class PlanReport:
    """Writes to one console."""

    def __init__(self, console: Console, request: PlanRequest, model_argv: Sequence[str]) -> None:
        """Hold what every part needs."""
        self._console, self._request = console, request
        self._model_argv = list(model_argv)

    def head(self, name: str) -> None:
        """Say what is planned, on what."""
        request = self._request
        model, hardware = request.model, request.hardware
        total, active = total_parameters(model).total, active_parameters(model)
        tokens = request.training.global_batch_size * request.training.seq_length
        self._say(f"model    {name}: {total / 1e9:.2f}B parameters, {active / 1e9:.2f}B active")
        self._say(
            f"cluster  {request.nodes} nodes x {hardware.gpus_per_node} = {request.world_size} "
            f"GPUs, {hardware.gpu}; {hardware.nodes_per_leaf} nodes under a leaf switch"
        )
        self._say(
            f"batch    {request.training.global_batch_size} sequences of "
            f"{request.training.seq_length} = {tokens / 1e6:.2f}M tokens"
        )
        modules = "Transformer Engine" if request.training.transformer_engine else "plain torch"
        self._say(f"modules  {modules}")

    def best(self, plans: BestPlans) -> None:
        """Show the best layouts, why each stands where it does, and the first one's flags."""
        self._say(
            f"\n{plans.legal} legal choices of sizes, {plans.evaluated} worked out; the others "
            "are slower even at best, or too large."
        )
        self.table(plans.best)
        for number, plan in enumerate(plans.best, 1):
            follower = plans.best[number] if number < len(plans.best) else None
            reason = f"; {why_faster(plan, follower)}" if follower else ""
            bound = bottleneck(plan, self._request.hardware)
            self._say(f"{number}. {plan.layout.name}: bound by {bound}{reason}.")
        self.whole_training(plans.best)
        self.groups(plans.best[0])
        self.warnings(plans.best[0])
        self.flags(plans.best[0])
        self.caveat()

    def table(self, plans: Sequence[LayoutPlan]) -> None:
        """Show layouts as rows."""
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column in _LEFT else "right")
        for number, plan in enumerate(plans, 1):
            table.add_row(str(number), *_row(plan, self._request))
        self._console.print(table)
        steps = {
            number: plan.memory
            for number, plan in enumerate(plans, 1)
            if plan.memory.peaks_in_the_step
        }
        if steps:
            needs = ", ".join(gigabytes(memory.step) for memory in steps.values())
            self._say(
                f"In layout{'s' * (len(steps) > 1)} {', '.join(map(str, steps))} the peak is the "
                f"optimizer's step, which needs {needs} GB in place of act and buffer."
            )

    def whole_training(self, plans: Sequence[LayoutPlan]) -> None:
        """Show how long the whole training takes, if it is known how much it reads."""
        tokens = self._request.train_tokens
        if tokens is None:
            return
        times = "; ".join(
            f"{f'{number}. ' if len(plans) > 1 else ''}{_duration(plan.seconds_for(tokens))}, "
            f"{plan.gpu_hours_for(tokens):,.0f} GPU hours"
            for number, plan in enumerate(plans, 1)
        )
        self._say(f"\n{tokens / 1e9:,.4g}B tokens take, without evaluation and saving: {times}.")

    def groups(self, plan: LayoutPlan) -> None:
        """Show over how many nodes and leaves each group is spread."""
        self._say("\nGroups of the first (ranks; nodes; leaf switches):")
        parts = [
            f"{name} {spread.members}; {spread.nodes}; {spread.leaves}"
            for name, spread in self._request.hardware.spreads(plan.layout).items()
        ]
        self._say("  " + "   ".join(parts))

    def warnings(self, plan: LayoutPlan) -> None:
        """Show likely problems."""
        for warning in plan_warnings(plan, self._request):
            self._say(f"warning: {warning}")

    def flags(self, plan: LayoutPlan) -> None:
        """Show the flags of ``megatron-switch train``."""
        argv = [*self._model_argv, *plan_flags(plan.layout, plan.training)]
        self._say("\nFlags:")
        for line in _wrapped(argv):
            self._say(f"  {line}")

    def placement(self, placement: NodeOrder, *, before: int) -> None:
        """Show the order of nodes that keeps expert groups under a leaf switch."""
        self._say(
            f"\nExpert groups under one leaf switch: {before} of {placement.blocks} in the file's "
            f"order, {placement.whole} in this one (SLURM_HOSTFILE, --distribution=arbitrary):"
        )
        self._say(f"  {','.join(placement.nodes)}")

    def caveat(self) -> None:
        """Say what the times are worth."""
        hardware = self._request.hardware
        if hardware.fitted:
            self._say(
                f"\nTimes are fitted to measurements (step factor {hardware.step_factor:.2f})."
            )
        else:
            self._say(
                "\nTimes are estimates: links and efficiency are assumptions until --fit has "
                "read nccl-tests output, and --measured-step one step."
            )

    def as_given(self, plan: LayoutPlan) -> None:
        """Show the run of the flags themselves line by line."""
        self._say(
            "\nThe run of these flags as 'train' starts it: what is not given has its default. "
            "--explain 1 shows the fastest layout instead."
        )
        total, budget = plan.memory.total, self._request.hardware.budget
        if total > budget:
            self._say(
                f"It does not fit: {gigabytes(total)} GB of {gigabytes(budget)} GB. Layouts that "
                "do: the same command without --explain, and without sizes that are to be chosen."
            )
        self.explained(plan)

    def not_kept(self, flags: Sequence[str]) -> None:
        """Say which flags the first plan has otherwise than they were given."""
        if flags:
            self._say(
                f"\nnote: The first layout does not have {', '.join(flags)}: optimizer, "
                "recomputation and overlap are planned. --explain without a number shows the run "
                "exactly as given."
            )

    def explained(self, plan: LayoutPlan) -> None:
        """Show one layout line by line."""
        self._say(f"\n{plan.layout.name}")
        for section in explain(plan, self._request):
            table = Table(box=None, show_header=False, pad_edge=False)
            table.add_column(style="bold")
            table.add_column()
            table.add_column(justify="right")
            for line in section.lines:
                table.add_row(f"  {line.name}", line.formula, line.result)
            self._say(f"\n{section.title}")
            self._console.print(table)
        self.whole_training([plan])
        self.caveat()

    def capacity_sweep(self, rows: Sequence[tuple[float, int, LayoutPlan]]) -> None:
        """Show drop rate and memory against the capacity factor."""
        self._say(f"\nCapacity factors in {rows[0][2].layout.name}:")
        table = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("factor", "slots", "dropped", "memory GB", "tokens/s GPU", "kept tokens/s"):
            table.add_column(column, justify="right")
        for factor, slots, plan in rows:
            table.add_row(
                f"{factor:g}",
                str(slots),
                f"{plan.dropped:.2%}",
                gigabytes(plan.memory.total),
                f"{plan.timing.tokens_per_second:.0f}",
                f"{plan.kept_tokens_per_second:.0f}",
            )
        self._console.print(table)

    def grid(
        self,
        form: GridProduct,
        plan: LayoutPlan,
        states: dict[Sharding, RankState],
        nearest: Sequence[LayoutPlan],
    ) -> None:
        """Answer the tutorials' form literally, and say what fits nearby."""
        budget = self._request.hardware.budget
        self._say(
            f"\n{form.data} x {form.model} x {form.experts} = {form.world_size} ranks means in "
            "Megatron:"
        )
        self._say(plan.layout.grids())
        self._say("\nState of one GPU (experts + everything else), before any activation:")
        for sharding, state in states.items():
            total = state.expert.total + state.dense.total
            verdict = "fits" if total <= budget else f"does not fit in {gigabytes(budget, 0)} GB"
            self._say(
                f"  {_SHARDING[sharding]:<32} {gigabytes(state.expert.total):>6} + "
                f"{gigabytes(state.dense.total)} = {gigabytes(total)} GB: {verdict}"
            )
        fits = plan.memory.total <= budget
        needs, of_what = plan.memory.buffers, "layers at work"
        if plan.memory.peaks_in_the_step:
            needs, of_what = plan.memory.step, "optimizer's step"
        self._say(
            f"With activations and buffers the {_SHARDING[plan.training.sharding]} peaks at "
            f"{gigabytes(plan.memory.total)} GB, {gigabytes(needs)} GB of it the {of_what}: "
            f"{'fits' if fits else 'does not fit'}."
        )
        self.warnings(plan)
        self.flags(plan)
        if nearest:
            self._say("\nNearest layouts that fit with the distributed optimizer alone:")
            self.table(nearest)
            self.flags(nearest[0])
        self.caveat()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


_COLUMNS = (
    "",
    "layout",
    "DP/EDP",
    "micro",
    "dispatch",
    "saving",
    "GB",
    "expert",
    "dense",
    "act",
    "buffer",
    "drop",
    "step s",
    "a2a",
    "bubble",
    "EP on",
    "tokens/s",
    "MFU",
)
_LEFT = ("layout", "dispatch", "saving", "EP on")


def _row(plan: LayoutPlan, request: PlanRequest) -> list[str]:
    memory, timing, layout = plan.memory, plan.timing, plan.layout
    spread = request.hardware.expert_spread(layout)
    where = f"{spread.nodes} nodes" if spread.nodes > 1 else "one node"
    return [
        layout.name,
        f"{layout.dp}/{layout.edp}",
        str(plan.training.micro_batch_size),
        plan.training.dispatch,
        _saving(plan),
        gigabytes(memory.total),
        gigabytes(memory.expert_state),
        gigabytes(memory.dense_state),
        gigabytes(memory.activations + memory.routing),
        gigabytes(max(memory.buffers, memory.logits)),
        f"{plan.dropped:.1%}",
        f"{timing.step:.3g}",
        f"{timing.all_to_all_share:.0%}",
        f"{timing.bubble:.0%}",
        where,
        f"{timing.tokens_per_second:.0f}",
        f"{timing.useful_mfu:.1%}",
    ]


def _duration(seconds: float) -> str:
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds >= 2 * 3600 else f"{seconds / 60:.0f} minutes"


def _saving(plan: LayoutPlan) -> str:
    training = plan.training
    parts = [
        {"replicated": "none", "distributed": "dist", "fully_sharded": "fsdp"}[training.sharding]
    ]
    parts += ["host"] if training.offload_optimizer else []
    parts += {"none": [], "selective": ["re-moe"], "full": ["re-all"]}[training.recompute]
    return "+".join(parts)


def _wrapped(argv: Sequence[str], width: int = 96) -> list[str]:
    """Return argv as lines of a shell command, broken before flags."""
    lines: list[str] = []
    for word in argv:
        starts = word.startswith("--")
        text = shlex.quote(word)
        if lines and (not starts or len(lines[-1]) + len(text) < width - 16):
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
