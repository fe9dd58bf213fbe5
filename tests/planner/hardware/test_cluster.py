"""Hardware files: presets load, and a mistake is told with line and key."""

import json
import re

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.planner.hardware.cluster import hardware_as_json, load_hardware, preset_names


@pytest.mark.parametrize("name", preset_names())
def test_presets_load_and_write_themselves(name, tmp_path):
    hardware = load_hardware(name)
    assert hardware.budget < hardware.memory_gb * 1e9
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(hardware_as_json(hardware)))
    assert hardware_as_json(load_hardware(str(path))) == hardware_as_json(hardware)


def test_the_promised_presets_are_there():
    assert {"a100-80gb-hdr", "h100-80gb-ndr", "h200-ndr", "b200"} <= set(preset_names())


def test_gpus_per_node_can_be_said_apart():
    assert load_hardware("b200", gpus_per_node=4).gpus_per_node == 4


def test_neither_preset_nor_file():
    with pytest.raises(ConfigError, match=r"--hardware .* v100 is neither\. Presets are a100"):
        load_hardware("v100")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"peak_tflops": 312',
            '"peak_tflops": "312"',
            r"key 'peak_tflops': expected a finite number",
        ),
        ('"peak_tflops": 312', '"peak_tflop": 312', r"'peak_tflop'.*Did you mean 'peak_tflops'"),
        (
            '"peak_tflops": 312',
            '"peak_tflops": 0',
            r"key 'peak_tflops': expected a finite number, above 0, found 0",
        ),
        (
            '"peer_us": 1',
            '"peer_us": -1',
            r"key 'network.peer_us': expected a finite number, 0 or more, found -1",
        ),
        ('"gpus_per_node": 8', '"gpus_per_node": 8.5', r"'gpus_per_node': expected a whole number"),
        ('"gpus_per_node": 8,', "", r"lacks the key 'gpus_per_node', a whole number"),
        ('"gemm_efficiency": 0.6', '"gemm_efficiency": 60', r"'gemm_efficiency'.*at most 1"),
        ('"reserved_gb": 2.0', '"reserved_gb": 90.0', r"'reserved_gb': leaves nothing"),
        ('"numa_nodes": 2', '"numa_nodes": 2, "numa_nodes": 2', r"twice: 'numa_nodes', lines \d+"),
        ('"numa_nodes": 2', '"numa_nodes": ', r"is not JSON: line \d+, column"),
    ],
)
def test_a_mistake_is_told_with_line_and_key(tmp_path, old, new, message):
    path = tmp_path / "cluster.json"
    text = json.dumps(hardware_as_json(load_hardware("a100-80gb-hdr")), indent=2)
    text = text.replace("312.0", "312").replace('"peer_us": 1.0', '"peer_us": 1')
    assert old in text
    # The last one, where a key occurs twice: that of the network stands behind the node's.
    place = text.rindex(old)
    path.write_text(text[:place] + new + text[place + len(old) :])
    with pytest.raises(ConfigError, match=message):
        load_hardware(str(path))


def test_the_line_is_the_right_one(tmp_path):
    path = tmp_path / "cluster.json"
    values = hardware_as_json(load_hardware("a100-80gb-hdr"))
    values["network"] = {**values["network"], "ring_gb_s": True}
    path.write_text(json.dumps(values, indent=2))
    lines = path.read_text().splitlines()
    wrong = next(number for number, line in enumerate(lines, 1) if line.endswith("true,"))
    with pytest.raises(ConfigError, match=re.escape(f"line {wrong}, key 'network.ring_gb_s'")):
        load_hardware(str(path))


def test_a_list_is_no_hardware(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"must hold an object, line 1"):
        load_hardware(str(path))
