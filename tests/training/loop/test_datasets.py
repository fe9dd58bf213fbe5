"""Which pairs each data set of a Switch-T5 gets."""

import json
from types import SimpleNamespace

import pytest
from megatron.core import parallel_state
from support.number_tokenizer import NumberTokenizer

from megatron_switch.training.loop import datasets
from megatron_switch.training.loop.datasets import t5_datasets_provider
from megatron_switch.training.preflight import data


def write(path, numbers):
    lines = [json.dumps({"input": str(number), "target": "7 8"}) for number in numbers]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def arguments(monkeypatch):
    def make(**changes):
        values = {
            "data_path": None,
            "train_data_path": None,
            "valid_data_path": None,
            "test_data_path": None,
            "split": None,
            "seed": 5,
            "seq_length": 4,
            "decoder_seq_length": 4,
            "mock_data": False,
        }
        args = SimpleNamespace(**(values | changes))
        monkeypatch.setattr(datasets, "get_args", lambda: args)
        return args

    for module in (datasets, data):
        monkeypatch.setattr(module, "get_tokenizer", NumberTokenizer)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    return make


def inputs(data):
    return sorted({data[index]["encoder_tokens"][0].item() for index in range(len(data))})


def test_one_set_of_files_is_split_without_overlap(arguments, tmp_path):
    arguments(data_path=[write(tmp_path / "p.jsonl", range(100, 140))], split="70,20,10")
    parts = [inputs(data) for data in t5_datasets_provider([28, 8, 4])]
    assert [len(part) for part in parts] == [28, 8, 4]
    assert sorted(number for part in parts for number in part) == list(range(100, 140))


def test_files_of_their_own_go_to_their_split(arguments, tmp_path):
    arguments(
        train_data_path=[write(tmp_path / f"{n}.jsonl", range(n, n + 5)) for n in (100, 110)],
        valid_data_path=[write(tmp_path / "v.jsonl", [150, 151])],
    )
    train, valid, test = t5_datasets_provider([30, 6, 0])
    assert inputs(train) == [*range(100, 105), *range(110, 115)]
    assert (len(train), inputs(valid), len(valid), test) == (30, [150, 151], 6, None)


def test_ranks_that_read_no_data_build_none(arguments, tmp_path, monkeypatch):
    arguments(data_path=[write(tmp_path / "p.jsonl", range(100, 140))], split="100,0,0")
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    assert t5_datasets_provider([9, 0, 0]) == (None, None, None)
