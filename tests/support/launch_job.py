"""A launch of 4 nodes, as the tests of scripts and environments change it."""

from megatron_switch.launch.job import LaunchJob
from megatron_switch.planner.hardware.cluster import load_hardware

MODEL = ("--num-experts", "64", "--num-attention-heads", "8", "--data-path", "corpus")


def job(*flags: str, **changes: object) -> LaunchJob:
    values: dict[str, object] = {
        "name": "switch",
        "nodes": 4,
        "hardware": load_hardware("h100-80gb-ndr"),
        "flags": (*MODEL, *flags),
        "run_dir": "runs/one",
    }
    return LaunchJob(**{**values, **changes})
