"""Write the versions installed in the running environment to ``constraints.txt`` (``make lock``).

Names and versions only. Left out is what torch pins exactly by itself, and differently on every
platform: the NVIDIA libraries.
"""

import importlib.metadata as metadata
import re
from argparse import ArgumentParser
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
HEADER = """\
# The versions that the tests ran with; written by `make lock`. Installing does not need them, but
# `make setup` uses them, so that a fresh machine gets what was tested.
"""
PINNED_BY_TORCH = re.compile(r"nvidia-|cuda-")
NOT_OURS_TO_PIN = {"megatron-switch", "pip"}


def pins() -> list[str]:
    """Return one ``name==version`` per installed distribution, sorted by name."""
    versions = {
        re.sub(r"[-_.]+", "-", dist.name).lower(): dist.version for dist in metadata.distributions()
    }
    return [
        f"{name}=={version}"
        for name, version in sorted(versions.items())
        if name not in NOT_OURS_TO_PIN and not PINNED_BY_TORCH.match(name)
    ]


def main() -> None:
    """Write the file; ``--help`` and mistakes write nothing."""
    ArgumentParser(description=__doc__).parse_args()
    CONSTRAINTS.write_text(HEADER + "\n".join(pins()) + "\n", encoding="utf-8")
    print(f"{CONSTRAINTS}: {len(pins())} versions")


if __name__ == "__main__":
    main()
