"""Flags are known by name without Megatron, and the names are those of the parser that trains."""

import importlib.util
import json
from argparse import ArgumentParser
from pathlib import Path

import pytest

from megatron_switch.architecture.model_flags import model_names, read_model
from megatron_switch.cli import main
from megatron_switch.errors import ConfigError
from megatron_switch.flags.train_flags import (
    FLAGS_FILE,
    add_flag,
    destination,
    flag_names,
    refuse_unknown,
)

TOOL = Path(__file__).resolve().parents[2] / "tools" / "make_flags_doc.py"


def test_the_flags_are_what_the_tool_would_write():
    spec = importlib.util.spec_from_file_location("make_flags_doc", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert FLAGS_FILE.read_text(encoding="utf-8") == tool.flags_file()
    assert {"num-layers", "switch-capacity", "use-megatron-fsdp"} <= flag_names()


def test_a_flag_is_added_as_the_trainer_has_it():
    parser = ArgumentParser()
    for flag in ("--num-layers", "--bf16", "--disable-bias-linear", "--data-path"):
        add_flag(parser, flag)
    add_flag(parser, "--tokenizer-type", choices=["NullTokenizer"])
    assert vars(parser.parse_args([])) == {
        "num_layers": None,
        "bf16": False,
        "add_bias_linear": True,
        "data_path": None,
        "tokenizer_type": None,
    }
    argv = ["--num-layers", "3", "--bf16", "--disable-bias-linear", "--data-path", "a", "b"]
    args = parser.parse_args(argv)
    assert (args.num_layers, args.bf16, args.data_path) == (3, True, ["a", "b"])
    assert args.add_bias_linear is False
    assert destination("--disable-bias-linear") == "add_bias_linear"
    assert destination("--num-layers") == "num_layers"


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
        ["rehearse", "--world-size", "8", "--", "--num-layers", "2", "--bogus-flag"],
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
