"""nccl-tests output is read from text and from JSON alike, and refused where it is neither."""

import json

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.planner.hardware.nccl_output import MessageTime, read_runs

SIZES = {8192: 21.5, 1 << 20: 80.0, 1 << 28: 12000.25}


def as_json(*, group_of=lambda process: 0, processes=16, per_host=8, ngpus=1):
    """The JSON of ``alltoall_perf -J``, keys as nccl-tests 2.19 writes them."""
    devices = [
        {
            "rank": process * ngpus,
            "group": group_of(process),
            "pid": 1000 + process,
            "hostname": f"node{process // per_host:03}",
            "device": process % per_host,
            "device_hex": "0000:07:00",
            "device_info": "NVIDIA H100 80GB HBM3",
        }
        for process in range(processes)
    ]
    results = [
        {
            "size": size,
            "count": size // 4,
            "type": "float",
            "redop": "none",
            "root": "    -1",
            "out_of_place": {"time": time, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0.0},
            "in_place": {"time": 2 * time, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": None},
            "actual_iterations": 20,
            "experiment_name": "AlltoAll",
        }
        for size, time in SIZES.items()
    ]
    return {
        "version": 3,
        "start_time": "2026-07-09 16:03:21",
        "args": ["./build/alltoall_perf", "-b", "8K", "-e", "256M", "-J", "out.json"],
        "env": ["PATH=/usr/bin"],
        "nccl_version": 22800,
        "config": {"nthreads": 1, "ngpus": ngpus, "validation": 1, "devices": devices},
        "results": results,
        "end_time": "2026-07-09 16:04:21",
    }


def written(tmp_path, values):
    path = tmp_path / "nccl.json"
    path.write_text(json.dumps(values, indent=1))
    return path


def test_json_gives_test_ranks_hosts_and_times(tmp_path):
    (run,) = read_runs(written(tmp_path, as_json()))
    assert (run.test, run.ranks, run.hosts) == ("alltoall", 16, 2)
    assert run.rows == tuple(MessageTime(size, time) for size, time in SIZES.items())


def test_a_process_may_have_several_ranks(tmp_path):
    (run,) = read_runs(written(tmp_path, as_json(processes=2, per_host=1, ngpus=8)))
    assert (run.ranks, run.hosts, run.peers) == (16, 2, 8)


def test_of_groups_that_ran_at_once_one_is_a_run(tmp_path):
    (run,) = read_runs(written(tmp_path, as_json(group_of=lambda process: process // 8)))
    assert (run.ranks, run.hosts) == (8, 1)
    text = "# Collective test starting: alltoall_perf\n"
    text += "".join(
        f"#  Rank {rank:2} Group {rank % 8:2} Pid 9 on node{rank // 8} device {rank % 8} [0] H100\n"
        for rank in range(16)
    )
    text += "8192 2048 float none -1 21.5 1 1 0\n1048576 262144 float none -1 80.0 1 1 0\n"
    path = tmp_path / "nccl.txt"
    path.write_text(text)
    (run,) = read_runs(path)
    assert (run.ranks, run.hosts, run.peers) == (2, 2, 1)


def _set(values, trail, new):
    *parents, last = trail
    for key in parents:
        values = values[key]
    if new is None:
        del values[last]
    else:
        values[last] = new


@pytest.mark.parametrize(
    ("trail", "new", "message"),
    [
        (("args",), None, r"nccl.json lacks the key 'args', a list"),
        (("args",), ["./pretrain"], r"line \d+, key 'args': begins with the test, one of alltoall"),
        (("config", "devices"), [], r"key 'config.devices': lists the ranks, and there is none"),
        (("config", "devices", 0, "hostname"), 7, r"'config.devices.0.hostname': expected a text"),
        (("results",), [{}], r"lacks the key 'time' in 'results.0.out_of_place'"),
        (("results",), [5], r"key 'results': expected a list of objects, found"),
        (("results", 1, "size"), "8K", r"key 'results.1.size': expected a whole number"),
        (("results", 1, "out_of_place"), [], r"'results.1.out_of_place': expected an object"),
        (
            ("results", 1, "out_of_place", "time"),
            "nan",
            r"key 'results.1.out_of_place.time': expected a finite number, above 0, found \"nan\"",
        ),
        (
            ("results", 2, "out_of_place", "time"),
            0.0,
            r"time': expected a finite number, above 0, found 0",
        ),
    ],
)
def test_malformed_json_is_told_with_its_key(tmp_path, trail, new, message):
    values = as_json()
    _set(values, trail, new)
    with pytest.raises(ConfigError, match=message):
        read_runs(written(tmp_path, values))


def test_one_size_is_too_few(tmp_path):
    values = as_json()
    del values["results"][1:]
    with pytest.raises(ConfigError, match=r"key 'results': 1 sizes, and a latency .* need two"):
        read_runs(written(tmp_path, values))


def test_what_was_cut_off_is_told_with_its_line(tmp_path):
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(as_json(), indent=1)[:-40])
    with pytest.raises(ConfigError, match=r"cut.json is not JSON: line \d+, column \d+"):
        read_runs(path)
