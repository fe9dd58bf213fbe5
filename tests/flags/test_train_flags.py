"""Flags are known by name without Megatron, and the names are those of the parser that trains."""

import importlib.util
import json
from pathlib import Path

import pytest

from megatron_switch.architecture.model_flags import model_names, read_model
from megatron_switch.cli import main
from megatron_switch.errors import ConfigError
from megatron_switch.flags.train_flags import NAMES_FILE, flag_names, refuse_unknown

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_flags_doc.py"


def test_the_names_are_what_the_tool_would_write():
    spec = importlib.util.spec_from_file_location("make_flags_doc", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert NAMES_FILE.read_text(encoding="utf-8") == tool.names()
    assert {"num-layers", "switch-capacity", "use-megatron-fsdp"} <= flag_names()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-layer", "3"], r"no flag --num-layer\. Did you mean --num-layers"),
        (["--bf16", "--micro-batchsize=2"], r"--micro-batchsize\. Did you mean --micro-batch-size"),
        (["--bogus"], r"no flag --bogus\. See docs/flags.md"),
    ],
)
def test_an_unknown_flag_names_the_nearest(words, message):
    with pytest.raises(ConfigError, match=message):
        refuse_unknown(words)


def test_known_flags_and_their_values_pass():
    refuse_unknown(["--num-layers", "3", "--lr=1e-3", "--moe-expert-capacity-factor", "-1"])


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--model", "gpt-1.6t-128", "--", "--bogus-flag"],
        ["render-launch", "--run-dir", "run", "--", "--num-layers", "2", "--bogus-flag"],
    ],
)
def test_commands_of_a_login_node_refuse_it(capsys, monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert "There is no flag --bogus-flag." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_model_file_is_told_with_line_and_key(tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"num-layers": 2, "hiden_size": 64}, indent=1))
    with pytest.raises(ConfigError, match=r"line 3, key 'hiden_size': .* --hidden-size"):
        read_model(str(path))
    for name in model_names():
        assert read_model(name)
