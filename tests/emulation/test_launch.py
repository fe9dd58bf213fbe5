"""Ranks start with torchrun's environment, hear every signal, and end together."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_switch.emulation import launch
from megatron_switch.emulation.launch import _Failure

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT_S = 60.0


def rank():
    return int(os.environ["RANK"])


def wait_for(condition):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_find_each_other(num_ranks, tmp_path):
    def target():
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        values = [os.environ[name] for name in VARIABLES]
        (tmp_path / str(rank())).write_text(" ".join([*values, str(int(total))]))
        dist.destroy_process_group()

    assert launch(num_ranks, target) == 0
    ports = set()
    for each in range(num_ranks):
        *values, port, total = (tmp_path / str(each)).read_text().split()
        assert values == [*map(str, (each, each, num_ranks, num_ranks)), "127.0.0.1"]
        assert total == str(num_ranks)
        ports.add(port)
    assert len(ports) == 1
    assert not os.environ.keys() & set(VARIABLES)  # this process is no rank


def test_ranks_have_one_thread_unless_told_otherwise(tmp_path, monkeypatch):
    def target():
        (tmp_path / "threads").write_text(str(torch.get_num_threads()))

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert launch(1, target) == 0
    assert (tmp_path / "threads").read_text() == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert launch(1, target) == 0
    assert (tmp_path / "threads").read_text() == "2"


def test_output_is_passed_on_as_it_is(capfd):
    assert launch(1, lambda: print("one\ntwo")) == 0
    assert capfd.readouterr().out == "one\ntwo\n"


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (lambda: 3, 3, "rank 0 exited with code 3"),
        (lambda: sys.exit(4), 4, "rank 0 exited with code 4"),
        (lambda: sys.exit("no such layout"), 1, "no such layout"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 137, "rank 0 was ended by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGINT), 130, "rank 0 was interrupted"),
        (lambda: sys.exit(), 0, ""),
        (lambda: sys.exit(0), 0, ""),
    ],
)
def test_exit_codes_are_those_of_the_rank(end, code, said, capfd):
    assert launch(1, end) == code
    assert said in capfd.readouterr().err


def test_nothing_is_added_to_an_error_that_a_rank_has_explained(capfd):
    def target():
        if rank() == 0:
            print("megatron-switch: error: no such layout", file=sys.stderr)
            return 2
        time.sleep(0.5)  # as other ranks do, which let rank 0 speak for them
        return 2

    assert launch(2, target) == 2
    assert capfd.readouterr().err == "megatron-switch: error: no such layout\n"


def test_the_first_failure_is_read_first_and_ends_all(capfd, tmp_path):
    def target():
        dist.init_process_group("gloo")
        (tmp_path / str(rank())).touch()
        if rank() == 2:
            wait_for(lambda: len(list(tmp_path.iterdir())) == 4)
            raise ValueError("this expert does not exist")
        dist.all_reduce(torch.ones(1))  # for ever, but for the rank that is gone

    started_s = time.monotonic()
    assert launch(4, target) == 1
    lines = capfd.readouterr().err.splitlines()
    mine = [index for index, line in enumerate(lines) if line.startswith("rank 2 of 4 failed")]
    tracebacks = [index for index, line in enumerate(lines) if line.startswith("Traceback")]
    assert tracebacks == [mine[0] + 1]
    assert "ValueError: this expert does not exist" in lines
    assert time.monotonic() - started_s < TIMEOUT_S


def test_a_rank_that_ignores_sigterm_is_killed(capfd, monkeypatch):
    monkeypatch.setattr(sys.modules[launch.__module__], "_GRACE_S", 0.2)

    def target():
        if rank() == 0:
            return 5
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(TIMEOUT_S)

    started_s = time.monotonic()
    assert launch(2, target) == 5
    assert time.monotonic() - started_s < TIMEOUT_S
    assert "rank 0 exited with code 5" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_rank_once(number, tmp_path):
    def target():
        received = []
        signal.signal(number, lambda *_: received.append(number))
        (tmp_path / f"ready-{rank()}").touch()
        if rank() == 0:
            wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
            os.kill(os.getppid(), number)
        wait_for(lambda: received)
        time.sleep(0.1)
        (tmp_path / f"got-{rank()}").write_text(str(len(received)))

    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    assert launch(2, target) == 0
    assert [path.read_text() for path in sorted(tmp_path.glob("got-*"))] == ["1", "1"]
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_second_signal_kills_ranks_that_hang(tmp_path, capfd):
    def target():
        received = []
        signal.signal(signal.SIGTERM, lambda *_: received.append(1))
        os.kill(os.getppid(), signal.SIGTERM)
        wait_for(lambda: received)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)

    assert launch(1, target) == 128 + signal.SIGKILL


def test_ranks_end_with_the_parent(tmp_path):
    def target():
        (tmp_path / f"{rank()}.tmp").write_text(str(os.getpid()))
        (tmp_path / f"{rank()}.tmp").rename(tmp_path / f"{rank()}.pid")
        time.sleep(TIMEOUT_S)

    parent = os.fork()
    if parent == 0:
        launch(2, target)
        os._exit(0)
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for(lambda: not any(Path(f"/proc/{pid}/cwd").exists() for pid in pids))


def test_of_a_rank_that_fails_after_another_the_error_is_shown_and_not_its_note():
    text = (
        "rank 0 of 2 failed:\nTraceback\nRuntimeError: peer is gone\nWhat rank 0 printed before: x"
    )
    assert _Failure(1, 0, text).last_line == "RuntimeError: peer is gone"
    assert _Failure(2, 0, "").last_line == ""
