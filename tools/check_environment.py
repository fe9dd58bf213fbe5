"""Say what the active environment lacks, for ``make ... PYTHON=python`` in a container.

Only this project itself is installed here, without its dependencies: a vendor's torch must not be
replaced by a tool. What else is missing is named, with the pip command that adds it and pins the
torch that is there.
"""

import argparse
import importlib.metadata as metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

PROJECT = "megatron-switch"
ROOT = Path(__file__).resolve().parents[1]


def missing_requirements(extras: list[str]) -> list[str]:
    """Return the requirements of this project that the environment does not meet.

    Args:
        extras: Names of optional dependencies (``test``, ``dev``) that are wanted too.
    """
    # megatron-core and pytest both bring packaging; without it most other things are missing too.
    if importlib.util.find_spec("packaging") is None:
        return ["packaging", *(line.split(";")[0].strip() for line in _requirement_lines())]
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in _requirement_lines()]
    environments = [{"extra": extra} for extra in ["", *extras]]
    return [
        f"{requirement.name}{requirement.specifier}"
        for requirement in wanted
        if requirement.marker is None
        or any(requirement.marker.evaluate(environment) for environment in environments)
        if not _is_met(requirement.name, requirement.specifier)
    ]


def _requirement_lines() -> list[str]:
    return metadata.requires(PROJECT) or []


def _is_met(name: str, specifier: object) -> bool:
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        # Vendors ship some packages under another name (pytorch-triton): what imports, counts.
        return importlib.util.find_spec(name.replace("-", "_")) is not None
    return specifier.contains(installed, prereleases=True)


def _install_project() -> None:
    try:
        metadata.version(PROJECT)
    except metadata.PackageNotFoundError:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--editable", str(ROOT)]
        subprocess.run(command, check=True)
        importlib.invalidate_caches()


def main() -> int:
    """Report on the environment that runs this file; return 1 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extras", nargs="*", help="optional dependencies that are wanted too")
    extras = parser.parse_args().extras
    version = ".".join(map(str, sys.version_info[:3]))
    if importlib.util.find_spec("torch") is None:
        print(f"The active environment ({sys.executable}, Python {version}) has no torch.")
        print("Activate one that has, or leave PYTHON=... out to let make fill .venv.")
        return 1
    if not (3, 12) <= sys.version_info[:2] <= (3, 13):
        print(f"megatron-core 0.19.2 runs on Python 3.12 and 3.13; {sys.executable} is {version}.")
        return 1
    _install_project()
    missing = missing_requirements(extras)
    if missing:
        torch_pin = f"torch=={metadata.version('torch')}"
        names = [name for name in missing if not re.match(r"torch\b", name)]
        print(f"The active environment ({sys.executable}) lacks, or has in another version:")
        print("".join(f"  {name}\n" for name in missing), end="")
        if names:
            print("Add what is missing without touching its torch:")
            quoted = " ".join(f"'{name}'" for name in [torch_pin, *names])
            print(f"  {sys.executable} -m pip install {quoted}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
