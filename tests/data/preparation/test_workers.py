"""Workers make the same shards as one process, and none outlives its parent."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from megatron_switch.data.preparation import token_shards
from megatron_switch.data.preparation.corpus import find_corpus
from megatron_switch.data.preparation.documents import ReadOptions
from megatron_switch.data.preparation.token_shards import ShardWriter, plan_shards
from megatron_switch.data.preparation.workers import write_shards
from megatron_switch.data.tokenizer import Tokenizer
from megatron_switch.errors import DataError

NUM_SHARDS = 4


class Bytes:
    """Stands for a tokenizer of Megatron's; some texts make it do what a process may do."""

    def tokenize(self, text):
        if text.startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if text.startswith("bad"):
            raise ValueError("no such word")
        if text.startswith("wait in "):
            folder = Path(text.split()[2])
            (folder / f"{os.getpid()}.pid").touch()
            time.sleep(60)
        return list(text.encode())


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """Return a function from texts to as many shards."""
    monkeypatch.setattr(token_shards, "_LEAST_WEIGHT", 1)
    (tmp_path / "text").mkdir()

    def make(*texts):
        for index, text in enumerate(texts):
            (tmp_path / "text" / f"{index}.txt").write_text(text)
        return plan_shards(find_corpus([tmp_path / "text"]).files)

    return make


def writer_into(folder):
    folder.mkdir()
    return ShardWriter(folder, Tokenizer(Bytes(), 257, 256), ReadOptions())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_any_number_of_workers_makes_the_same_files(tmp_path, shards, make_text):
    planned = shards(*(make_text(9, seed=str(index)) for index in range(NUM_SHARDS)))
    assert len(planned) == NUM_SHARDS
    made = []
    for workers in (1, 2, 9):
        writer = writer_into(tmp_path / str(workers))
        records = []
        write_shards(writer, planned, workers=workers, on_finished=records.append)
        assert {record.index for record in records} == set(range(NUM_SHARDS))
        made.append(contents(writer.folder))
    assert made[0] == made[1] == made[2]


def test_nothing_to_do_starts_nothing(tmp_path):
    write_shards(writer_into(tmp_path / "w"), [], workers=2, on_finished=pytest.fail)


def test_an_error_in_a_worker_arrives(tmp_path, shards):
    planned = shards("good", "bad", "good", "good")
    with pytest.raises(DataError, match=r"1\.txt: the tokenizer cannot take .*no such word"):
        write_shards(writer_into(tmp_path / "w"), planned, workers=2, on_finished=lambda _: None)


def test_a_killed_worker_is_explained(tmp_path, shards):
    planned = shards("good", "die", "good", "good")
    with pytest.raises(DataError, match=r"One of 2 worker processes was killed.*fewer --workers"):
        write_shards(writer_into(tmp_path / "w"), planned, workers=2, on_finished=lambda _: None)


def test_workers_end_with_a_killed_parent(tmp_path, shards):
    planned = shards(*[f"wait in {tmp_path} "] * 2)
    writer = writer_into(tmp_path / "w")
    parent = multiprocessing.get_context("fork").Process(
        target=write_shards,
        args=(writer, planned),
        kwargs={"workers": 2, "on_finished": print},
    )
    parent.start()
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    workers = [int(path.stem) for path in tmp_path.glob("*.pid")]
    parent.kill()
    parent.join()
    wait_until(lambda: not any(map(runs, workers)))


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # ended, and nobody has asked for its status yet


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
