"""Rendered scripts: valid bash that says what the job says, and the examples among them."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support.launch_job import job

from megatron_switch.cli import main
from megatron_switch.launch.job import Container
from megatron_switch.launch.render import render_sbatch, render_shell
from megatron_switch.utils.exit_codes import SAVED

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "slurm").glob("*"))
COMMAND = ("megatron-switch", "render-launch")
EXPERTS = ("--expert-model-parallel-size", "16")


def sbatch(*flags: str, **changes: object) -> str:
    return render_sbatch(job(*flags, **changes), "hopper", COMMAND)


def options(text: str) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE)
    return dict(lines)


def flags_in_bash(text: str) -> list[str]:
    """Return FLAGS as bash reads them."""
    array = text[text.index("FLAGS=(") : text.index("mkdir -p")]
    script = f'RUN=runs/one\n{array}\nprintf "%s\\0" "${{FLAGS[@]}}"'
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("render", [render_sbatch, render_shell])
@pytest.mark.parametrize("shape", ["srun", "torchrun"])
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"container": Container("image", ("/a:/a",), "/b"), "run_dir": "/a/run"},
        {"hostfile": "hosts.txt", "bind": False},
    ],
    ids=str,
)
def test_bash_can_read_every_form(render, shape, nodes, more):
    text = render(job(shape=shape, nodes=nodes, **more), "hopper", COMMAND)
    subprocess.run(["bash", "-n"], input=text, check=True, text=True)
    assert "{{" not in text
    assert "{%" not in text


@pytest.mark.parametrize("render", [render_sbatch, render_shell])
def test_flags_arrive_as_they_were_given(render):
    awkward = ("--wandb-exp-name", 'it\'s "quoted" $HOME `x` \\ *', "--data-path", "a b", "c")
    found = flags_in_bash(render(job(*awkward), "hopper", COMMAND))
    given = [*job(*awkward).flags]
    kept = ["--switch-keep-checkpoints", "3"]
    assert found == [*given, *kept, "--switch-run-dir", "runs/one", "--switch-device", "cuda"]


@pytest.mark.parametrize("flag", ["--switch-keep-checkpoints", "--save-retain-interval"])
def test_what_a_run_keeps_is_the_flags_to_say(flag):
    found = flags_in_bash(sbatch(flag, "100"))
    assert [word for word in found if "keep" in word or "retain" in word] == [flag]


def test_what_slurm_is_told():
    found = options(sbatch(time_limit="2:00:00", save_seconds=120, sbatch=("account=me",)))
    assert found["nodes"] == "4"
    assert found["ntasks-per-node"] == "8"
    assert found["gres"] == "gpu:8"
    assert found["signal"] == "B:USR1@120"
    assert found["time"] == "2:00:00"
    assert found["account"] == "me"
    assert found["switches"] == "1@30:00"
    assert "requeue" in found
    assert options(sbatch(shape="torchrun"))["ntasks-per-node"] == "1"
    assert "switches" not in options(sbatch(nodes=1))


def test_a_comment_above_the_switches_explains_them():
    above, *_ = sbatch().split("#SBATCH --switches=1@30:00")
    assert re.search(
        r"# Wait up to 30 minutes .* for nodes under 1 leaf switch, then use\n"
        r"# any\. Delete the line if the cluster rejects it; .*\n$",
        above,
    )
    assert "30 minutes" not in sbatch(nodes=1)


def test_each_shape_saves_on_a_signal_that_its_ranks_get():
    assert "scancel --signal=TERM" in sbatch(shape="srun")
    under_torchrun = sbatch(shape="torchrun")
    assert "scancel --signal=USR1" in under_torchrun
    assert "--exit-signal SIGUSR1" in under_torchrun


def test_the_exit_code_of_a_run_that_has_saved_is_known_where_srun_hands_it_on():
    assert f"status != {SAVED}" in sbatch(shape="srun")
    assert f"status != {SAVED}" not in sbatch(shape="torchrun")


def test_ranks_are_bound_to_the_memory_domain_of_their_gpu():
    assert "map_ldom:0,0,0,0,1,1,1,1" in sbatch()
    assert "--numa-binding node" in sbatch(shape="torchrun")
    assert "map_ldom" not in sbatch(bind=False)
    assert "--numa-binding" not in sbatch(shape="torchrun", bind=False)


def test_an_expert_group_over_nodes_gets_a_hint_for_blocks():
    assert "sbatch --segment=2 switch.sbatch" in sbatch(*EXPERTS)
    assert "--segment" not in sbatch("--expert-model-parallel-size", "8")


def test_a_container_runs_every_step():
    box = Container("nvcr.io#nvidia/pytorch:25.10-py3", ("/a:/b", "/c:/c"), "/b")
    text = sbatch(container=box, run_dir="/c/run")
    for part in ("pytorch:25.10-py3'", "--container-mounts=/a:/b,/c:/c", "--container-workdir=/b"):
        assert part in text
    assert re.search(r"--container-env=NODES,GPUS,.*NCCL_NVLS_ENABLE", text)
    assert sbatch().count("CONTAINER=()") == 1


def test_the_planned_groups_are_measured():
    text = sbatch(*EXPERTS)
    assert 'nccl_test ep "DIV 16" alltoall_perf # 16 ranks' in text
    assert 'nccl_test dp "DIV 32" reduce_scatter_perf # 32 ranks' in text


RENDERERS = {render_sbatch: "these flags cannot be rehearsed", render_shell: "PREFLIGHT-gpus port}"}
"""How each script shows that it rehearses nothing: a line that says so, or a list of checks."""


@pytest.mark.parametrize(("render", "unrehearsed"), RENDERERS.items())
@pytest.mark.parametrize(
    "flags",
    [
        ("--switch-capacity-group", "ep", "--switch-dispatch", "packed", *EXPERTS),
        ("--context-parallel-size", "2"),
        ("--fp8-format", "hybrid"),
        ("--moe-expert-capacity-factor", "-1"),
        ("--offload-modules", "core_attn", "moe_act"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_rehearsed_is_not_tried(render, unrehearsed, flags):
    text = render(job(*flags), "hopper", COMMAND)
    assert unrehearsed in text


@pytest.mark.parametrize(("render", "unrehearsed"), RENDERERS.items())
@pytest.mark.parametrize(
    "flags",
    [(), ("--offload-modules", "core_attn"), ("--optimizer-cpu-offload",)],
    ids=" ".join,
)
def test_everything_else_is_rehearsed(render, unrehearsed, flags):
    text = render(job(*flags), "hopper", COMMAND)
    assert unrehearsed not in text
    assert "megatron_switch rehearse" in text


@pytest.mark.parametrize("render", RENDERERS)
def test_packed_dispatch_is_rehearsed_as_padded_dispatch(render):
    def text(mode):
        return render(job("--switch-dispatch", mode), "hopper", COMMAND)

    assert '"$@" --switch-dispatch padded \\' in text("packed")
    assert "--switch-dispatch padded" not in text("auto")


def test_ranks_look_at_their_binding_where_srun_binds_them():
    assert "check-binding ||" in sbatch()
    assert 'preflight="gpus port binding"' in sbatch()
    for other in (sbatch(shape="torchrun"), sbatch(bind=False)):
        assert 'preflight="gpus port"' in other


def test_examples_exist():
    assert [path.name for path in EXAMPLES] == [
        "container.sbatch",
        "gpt_1024_gpus.sbatch",
        "multi_node.sbatch",
        "one_node.sbatch",
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_what_its_own_command_renders(example, tmp_path):
    head = example.read_text().split("# Rendered by:\n", 1)[1].split("#\n", 1)[0]
    command = re.sub(r"^#", "", head, flags=re.MULTILINE).replace("\\\n", " ")
    words = shlex.split(command)
    assert words[:2] == ["megatron-switch", "render-launch"]
    at = words.index("--")
    assert main([*words[1:at], "--output", str(tmp_path), *words[at:]]) == 0
    assert (tmp_path / example.name).read_text() == example.read_text()
