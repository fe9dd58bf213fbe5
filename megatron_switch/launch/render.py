"""A job as text: the sbatch file, and the shell script for nodes without SLURM.

Templates make no decision that could be made here or in :mod:`megatron_switch.launch.job`; an unset
name in a template is an error.
"""

import shlex
import signal
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from megatron_switch.launch.environment import Generation, environment_of
from megatron_switch.launch.job import LaunchJob
from megatron_switch.launch.nccl_tests import group_tests, untestable_axes
from megatron_switch.layout.grid import Layout
from megatron_switch.utils.exit_codes import SAVED

_NOT_REHEARSED = ("fp8-format", "fp4-format", "use-torch-fsdp2", "cpu-offloading-num-layers")
_ENGINE_EXPERTS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
"""Flags, and values of ``--offload-modules``, that a rehearsal refuses."""


def render_sbatch(job: LaunchJob, generation: Generation, command: Sequence[str]) -> str:
    """Return the sbatch file of a job.

    Args:
        job: The launch.
        generation: Generation of its GPUs.
        command: argv that rendered the script, for its header.
    """
    # With torchrun the ranks save on SIGUSR1, because torchrun itself acts on SIGTERM.
    chosen = signal.SIGTERM if job.shape == "srun" else signal.SIGUSR1
    return _render(
        "job.sbatch.jinja",
        job=job,
        variables=environment_of(job, generation),
        command=_wrapped(command),
        signal=chosen.name.removeprefix("SIG"),
        saved=SAVED,
        leaves=-(-job.nodes // job.hardware.nodes_per_leaf),
        domains=_domains(job),
        tests=group_tests(job.layout),
        missing=untestable_axes(job.layout),
        rehearsed=rehearsal_flags(job),
    )


def render_shell(job: LaunchJob, generation: Generation, command: Sequence[str]) -> str:
    """Return the script that starts the ranks of one node; see :func:`render_sbatch`."""
    return _render(
        "job.sh.jinja",
        job=job,
        variables=environment_of(job, generation),
        command=_wrapped(command),
        rehearsed=rehearsal_flags(job),
    )


def rehearsal_flags(job: LaunchJob) -> str | None:
    """Return the flags in which a rehearsal differs; None if the launch cannot be rehearsed.

    Packed dispatch depends on tensor values, which a rehearsal lacks; padded dispatch replaces it.
    """
    values = job.values
    refused = any(values.on(flag) for flag in _NOT_REHEARSED) or job.layout.cp > 1
    modules = values.values.get("offload-modules", ())
    inside = _ENGINE_EXPERTS.intersection(modules if isinstance(modules, list) else [modules])
    dropless = values.number("moe-expert-capacity-factor", 1.25) < 0
    if refused or inside or dropless or values.text("switch-capacity-group", "") == "ep":
        return None
    packed = values.text("switch-dispatch", "auto") == "packed"
    return "--switch-dispatch padded" if packed else ""


def flag_lines(job: LaunchJob) -> list[str]:
    """Return the lines of the array ``FLAGS``, quoted for bash: a flag and its values per line."""
    lines: list[list[str]] = []
    for word in job.flags:
        if word.startswith("--") or not lines:
            lines.append([])
        quoted = shlex.quote(word)
        # A comma needs no quotes, but shellcheck reports it as a likely typo in an array.
        lines[-1].append(f"'{word}'" if quoted == word and "," in word else quoted)
    if not any(
        job.values.has(flag) for flag in ("switch-keep-checkpoints", "save-retain-interval")
    ):
        lines.append(["--switch-keep-checkpoints", str(_KEPT)])
    lines += [["--switch-run-dir", '"$RUN"'], ["--switch-device", "cuda"]]
    return [" ".join(line) for line in lines]


def layout_line(layout: Layout) -> str:
    """Return one line with the sizes of both grids."""
    dense = f"TP {layout.tp} x CP {layout.cp} x PP {layout.pp} x DP {layout.dp}"
    expert = f"ETP {layout.etp} x EP {layout.ep} x PP {layout.pp} x EDP {layout.edp}"
    return f"Layout: {dense}; experts {expert}."


def _domains(job: LaunchJob) -> list[int]:
    """Return the NUMA node of each GPU of a node; consecutive GPUs share a NUMA node."""
    per_domain = -(-job.gpus_per_node // job.hardware.numa_nodes)
    return [gpu // per_domain for gpu in range(job.gpus_per_node)]


def _wrapped(command: Sequence[str]) -> str:
    """Return a command as comment lines that a shell can run once the comment marks are removed."""
    lines = [""]
    for word in map(shlex.quote, command):
        if len(lines[-1]) + len(word) > _WIDTH:
            lines.append("")
        lines[-1] += f"{word} "
    return "\\\n#     ".join(lines).rstrip()


_WIDTH = 88
_KEPT = 3
"""Checkpoints that a run keeps where its flags do not say."""


def _render(template: str, **values: object) -> str:
    environment = Environment(
        loader=PackageLoader("megatron_switch.launch"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML
    )
    environment.filters["quote"] = shlex.quote
    environment.globals.update(flag_lines=flag_lines, layout_line=layout_line)
    return environment.get_template(template).render(**values).lstrip("\n")
