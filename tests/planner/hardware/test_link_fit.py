"""Links fitted to nccl-tests output give back the numbers that the output was made from."""

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.planner.hardware.cluster import load_hardware
from megatron_switch.planner.hardware.link_fit import fitted_hardware, fitted_step
from megatron_switch.planner.hardware.nccl_output import read_runs

A100 = load_hardware("a100-80gb-hdr")


def output(test, ranks, hosts, seconds_of, sizes=(8192, 65536, 1 << 20, 1 << 24, 1 << 28)):
    """Text in the form of nccl-tests 2.13 and later."""
    per_host = ranks // hosts
    lines = [
        f"# Collective test starting: {test}_perf",
        "# nThread 1 nGpus 1 minBytes 8192 maxBytes 268435456 step: 2(factor) warmup iters: 5",
        "#",
        "# Using devices",
    ]
    lines += [
        f"#  Rank {r:2} Group  0 Pid {1000 + r} on node{r // per_host:03} device {r % per_host} "
        "[0x07] NVIDIA A100-SXM4-80GB"
        for r in range(ranks)
    ]
    lines += [
        "#                                                              out-of-place    in-place",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)",
    ]
    for size in sizes:
        time = seconds_of(size) * 1e6
        lines.append(f"{size:12} {size // 4:12} float none -1 {time:8.2f} 1.0 1.0 0 {time:8.2f} 1")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 12.3456", "#"]
    return "\n".join(lines) + "\n"


def write(tmp_path, *texts):
    path = tmp_path / "nccl.txt"
    path.write_text("".join(texts))
    return path


def test_rings_inside_and_across_nodes(tmp_path):
    path = write(
        tmp_path,
        output("all_gather", 8, 1, lambda size: 9e-6 + size * 7 / 8 / 220e9),
        output("all_reduce", 16, 2, lambda size: 30e-6 + size * 2 * 15 / 16 / 22e9),
    )
    fitted = fitted_hardware(A100, read_runs(path))
    assert fitted.fitted
    assert fitted.node.ring_gb_s == pytest.approx(220, rel=0.01)
    assert fitted.node.ring_latency_us == pytest.approx(9, rel=0.02)
    assert fitted.network.ring_gb_s == pytest.approx(22, rel=0.01)
    assert fitted.network.ring_latency_us == pytest.approx(30, rel=0.02)
    assert fitted.node.alltoall_gb_s == A100.node.alltoall_gb_s  # not measured


def test_two_sizes_of_all_to_all_tell_latency_from_peers(tmp_path):
    def seconds(ranks):
        peers = ranks - 8
        return lambda size: 15e-6 + peers * 2e-6 + size * peers / ranks / 20e9

    path = write(
        tmp_path, output("alltoall", 16, 2, seconds(16)), output("alltoall", 64, 8, seconds(64))
    )
    fitted = fitted_hardware(A100, read_runs(path))
    assert fitted.network.alltoall_gb_s == pytest.approx(20, rel=0.01)
    assert fitted.network.alltoall_latency_us == pytest.approx(15, rel=0.05)
    assert fitted.network.peer_us == pytest.approx(2, rel=0.02)


def test_one_size_leaves_the_latency_and_gives_the_rest_to_peers(tmp_path):
    path = write(tmp_path, output("alltoall", 16, 2, lambda size: 28e-6 + size * 8 / 16 / 20e9))
    fitted = fitted_hardware(A100, read_runs(path))
    assert fitted.network.alltoall_latency_us == A100.network.alltoall_latency_us == 12
    assert fitted.network.peer_us == pytest.approx((28 - 12) / 8, rel=0.02)


def test_a_measured_step_scales_what_is_predicted():
    fitted = fitted_step(A100, measured=9.0, predicted=6.0)
    assert fitted.step_factor == pytest.approx(1.5)
    again = fitted_step(fitted, measured=9.0, predicted=9.0)
    assert again.step_factor == pytest.approx(1.5)
    with pytest.raises(ConfigError, match=r"--measured-step takes seconds above 0, got -1"):
        fitted_step(A100, measured=-1, predicted=6.0)


def test_ranks_and_hosts_are_counted(tmp_path):
    (run,) = read_runs(write(tmp_path, output("sendrecv", 16, 2, lambda size: 1e-5 + size / 1e10)))
    assert (run.test, run.ranks, run.hosts, len(run.rows)) == ("sendrecv", 16, 2, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "hello\n", r"found no nccl-tests output"),
        (lambda text: text.replace("# ", "; "), r"line \d+: alltoall_perf lacks the lines '# Rank"),
        (
            lambda text: text.replace("none -1 ", "none -1 n/a ", 1),
            r"line \d+: expected size, count, type, redop, root and time, found '8192",
        ),
        (lambda text: "\n".join(text.splitlines()[:-7]), r"has one size only"),
    ],
)
def test_malformed_output_is_told_with_its_line(tmp_path, change, message):
    path = write(tmp_path)
    path.write_text(change(output("alltoall", 16, 2, lambda size: 1e-5 + size / 1e10)))
    with pytest.raises(ConfigError, match=message):
        read_runs(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"--fit reads nccl-tests output, and .* cannot be"):
        read_runs(tmp_path / "absent.txt")


def test_times_that_do_not_grow_have_no_bandwidth(tmp_path):
    path = write(tmp_path, output("alltoall", 16, 2, lambda size: 1e3 / size))
    with pytest.raises(ConfigError, match=r"times of alltoall_perf do not grow .* -e 1G"):
        fitted_hardware(A100, read_runs(path))
