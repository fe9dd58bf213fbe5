"""Scripts are clean for shellcheck, which comes with Debian and not with PyPI, as SLURM does."""

import subprocess
from pathlib import Path

import pytest
from support.launch_job import job

from megatron_switch.launch.job import Container
from megatron_switch.launch.render import render_sbatch, render_shell

ROOT = Path(__file__).parents[2]
SCRIPTS = [*(ROOT / "examples").rglob("*.s*"), *(ROOT / "tools").glob("*.sh"), ROOT / ".ci" / "run"]

pytestmark = pytest.mark.slurm


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_of_the_checkout(script):
    check(script.read_text())


@pytest.mark.parametrize("render", [render_sbatch, render_shell])
@pytest.mark.parametrize("shape", ["srun", "torchrun"])
@pytest.mark.parametrize("container", [None, Container("image", ("/a:/b", "/c:/c"), "/b")])
@pytest.mark.parametrize("hostfile", ["", "hosts of mine.txt"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_rendered_scripts(render, shape, container, hostfile, nodes):
    launch = job(
        shape=shape, container=container, hostfile=hostfile, nodes=nodes, run_dir="/c/my run"
    )
    check(render(launch, "hopper", ("megatron-switch", "render-launch")))


def check(text: str) -> None:
    words = ["shellcheck", "--shell=bash", "-"]
    done = subprocess.run(words, input=text, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
