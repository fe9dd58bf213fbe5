"""A SLURM cluster of two nodes on this host, for as long as a ``with`` block lasts.

Debian's slurm-wlm and munge must be installed, and it takes root. Nodes n1 and n2 claim two GPUs
each, which nobody opens. Everything it writes is in one folder.
"""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

_CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
OverTimeLimit=1
MpiDefault=none
SwitchType=switch/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs=2 Gres=gpu:2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs=2 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A running cluster.

    Attributes:
        folder: Where all its files are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str, check: bool = True, **environment: str) -> str:
        """Return what a command of SLURM's prints."""
        done = subprocess.run(
            words,
            env=self._environment | environment,
            cwd=self.folder,
            check=False,
            capture_output=True,
            text=True,
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, *words: str, **environment: str) -> str:
        """Submit a script and return the job's number."""
        return self.run("sbatch", "--parsable", *words, **environment).strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as ``RUNNING``."""
        return self._shown(job, "JobState")

    def wait_for_restart(self, job: str, *, seconds: float) -> None:
        """Return when a job has been put back into the queue.

        Raises:
            TimeoutError: If it has not by then.
        """
        _wait_until(lambda: self._shown(job, "Restarts") == "1", f"job {job} again", seconds)

    def _shown(self, job: str, name: str) -> str:
        return self.run("scontrol", "show", "job", job).split(f"{name}=")[1].split()[0]

    def wait(self, job: str, *, seconds: float) -> str:
        """Return the state in which a job ended.

        Raises:
            TimeoutError: If it has not by then.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            state = self.state(job)
            if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                return state
            time.sleep(0.5)
        raise TimeoutError(f"Job {job} is {self.state(job)} after {seconds:.0f} s.")


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster; stop it, with all its jobs, at the end.

    Args:
        folder: Empty folder, whose path is short enough for a socket's name.
    """
    missing = [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        raise RuntimeError(
            f"A test cluster needs root and Debian's slurm-wlm and munge; missing: {missing}."
        )
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    controller, first, second = _free_ports(3)
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(folder=folder, controller=controller, first=first, second=second))
    # SLURM wants devices that exist, and opens none.
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    with ExitStack() as stack:
        _start_munge(folder, stack)
        environment = {**os.environ, "SLURM_CONF": str(conf)}
        for words in (
            ["slurmctld", "-D", "-f", str(conf)],
            ["slurmd", "-D", "-f", str(conf), "-N", "n1"],
            ["slurmd", "-D", "-f", str(conf), "-N", "n2"],
        ):
            _start(words, stack, env=environment)
        cluster = Cluster(folder)
        _wait_for_nodes(cluster)
        stack.callback(cluster.run, "scancel", "--user=root", check=False)
        yield cluster


def _start_munge(folder: Path, stack: ExitStack) -> None:
    """Start an authentication service of our own, beside one that may run already."""
    home = folder / "munge"
    home.mkdir(mode=0o755)
    user = pwd.getpwnam("munge")
    key = home / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for path in (home, key):
        os.chown(path, user.pw_uid, user.pw_gid)
    words = ["munged", "--foreground", "--force", f"--key-file={key}"]
    words += [f"--socket={home}/socket", f"--log-file={home}/log"]
    words += [f"--pid-file={home}/pid", f"--seed-file={home}/seed"]
    _start(words, stack, user="munge", group="munge")
    _wait_until((home / "socket").exists, "munged")


def _start(words: list[str], stack: ExitStack, **options: Any) -> None:
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options
    )

    def stop() -> None:
        process.terminate()
        process.wait(20)

    stack.callback(stop)


def _wait_for_nodes(cluster: Cluster) -> None:
    def both_idle() -> bool:
        return cluster.run("sinfo", "-h", "-N", "-o", "%T", check=False).split() == ["idle"] * 2

    _wait_until(both_idle, "nodes")


def _wait_until(true: Callable[[], bool], what: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not start within {seconds:.0f} s.")
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
