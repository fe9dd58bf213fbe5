"""The record of a run, ``run.json``: what the run is, and each time it was started.

The keys at the top are those of the newest start. ``starts`` has an entry for each one, the oldest
first: when, from which iteration, on which hosts, in which SLURM job, layout and versions, and how
it ended. ``exit`` is null while it runs, and for good where the process was killed.
"""

import json
import os
import platform
import subprocess
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_switch import __version__
from megatron_switch.flags.known_flags import KNOWN_FLAGS
from megatron_switch.layout.grid import Layout
from megatron_switch.utils.atomic_file import renamed_into_place

SCHEMA = "megatron-switch/run/1"
_PACKAGES = ("megatron-core", "torch", "transformer-engine", "apex", "triton", "numpy")
_AXES = ("tp", "cp", "pp", "dp", "etp", "ep", "edp")
_OF_A_START = ("command", "device", "versions", "git_commit")
"""Keys that a start has too."""
_SLURM = {
    "job_id": "SLURM_JOB_ID",
    "array_job_id": "SLURM_ARRAY_JOB_ID",
    "array_task_id": "SLURM_ARRAY_TASK_ID",
    "restart_count": "SLURM_RESTART_COUNT",
}


def identity_of(args: Namespace) -> dict[str, Any]:
    """Return what tells this run from others, by attribute."""
    return {
        name: _plain(getattr(args, name)) for name, each in KNOWN_FLAGS.items() if each.identity
    }


class RunRecord:
    """The file of one run, of which this process makes one start.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: dict[str, Any] = {}

    def identity(self) -> dict[str, Any]:
        """Return the identity that the file holds.

        Raises:
            ValueError: It cannot be read as such a record; KeyError and TypeError alike.
        """
        found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))["identity"]
        return found

    def begin(
        self, args: Namespace, command: str, device: str, *, layout: Layout, hosts: Sequence[str]
    ) -> None:
        """Write the record of this start.

        Args:
            args: Arguments, with the iteration that was loaded.
            command: What continues the run.
            device: Where it trains.
            layout: The ranks.
            hosts: The host of each rank.
        """
        starts = self._earlier_starts()
        now = _now()
        content = {
            "schema": SCHEMA,
            "started": now,
            "command": command,
            "identity": identity_of(args),
            "seed": args.seed,
            "device": device,
            "versions": _versions(),
            "git_commit": _git_commit(),
            "hardware": _hardware(device),
            "flags": {name: _plain(value) for name, value in sorted(vars(args).items())},
        }
        start = {
            "time": now,
            "iteration": getattr(args, "iteration", 0),
            **{key: content[key] for key in _OF_A_START},
            "layout": {"ranks": layout.world_size, **{a: getattr(layout, a) for a in _AXES}},
            "hosts": list(dict.fromkeys(hosts)),
            "slurm": slurm_job(os.environ),
            "exit": None,
        }
        self._content = {**content, "starts": [*starts, start]}
        self._write()

    def end(self, *, code: int, reason: str, iteration: int) -> None:
        """Add to this start how it ended; without an effect before :meth:`begin`."""
        if not self._content:
            return
        ending = {"time": _now(), "code": code, "reason": reason, "iteration": iteration}
        self._content["starts"][-1]["exit"] = ending
        self._write()

    def _earlier_starts(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        found = json.loads(self._path.read_text(encoding="utf-8"))
        if "starts" not in found:  # of an earlier release, which kept the newest only
            return [{"time": found.get("started"), **{key: found.get(key) for key in _OF_A_START}}]
        return list(found["starts"])

    def _write(self) -> None:
        with renamed_into_place(self._path) as file:
            json.dump(self._content, file, indent=1)
            file.write("\n")


def slurm_job(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return what SLURM calls the job, or None outside of one."""
    return {key: environ[name] for key, name in _SLURM.items() if name in environ} or None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    found = {"megatron-switch": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # optional, or renamed inside a vendor container
    return found


def _git_commit() -> str | None:
    """Return the commit of the checkout this package runs from, and whether files were changed.

    None for an installed wheel, which may lie inside a checkout of something else.
    """
    try:
        _git("ls-files", "--error-unmatch", __file__)
        return _git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _hardware(device: str) -> dict[str, Any]:
    hardware: dict[str, Any] = {"machine": platform.machine(), "cpus": os.cpu_count()}
    if device == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name()
        hardware["gpus"] = torch.cuda.device_count()
    return hardware


def _plain(value: Any) -> Any:
    """Return what JSON can hold: containers and scalars as they are, anything else as text."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
