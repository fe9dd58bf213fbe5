"""Fit the links of a cluster to what nccl-tests measured on it, and the step to a measured one.

The model of a row is ``time = latency + peers x peer + wire bytes / bandwidth``, where wire bytes
are what a rank sends on the slower link. Its terms are fitted by least squares of relative errors,
so that small messages decide the latency and large ones the bandwidth. Latency and the time a peer
costs can be separated only by runs with different numbers of peers; with one run the latency of
the hardware file stays, and the rest is the peers'.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_switch.errors import ConfigError
from megatron_switch.planner.hardware.cluster import Hardware, Link
from megatron_switch.planner.hardware.nccl_output import Run


def fitted_hardware(hardware: Hardware, runs: Sequence[Run]) -> Hardware:
    """Return ``hardware`` with the links that the runs measured.

    Raises:
        ConfigError: If times do not grow with sizes, so that no bandwidth can be fitted.
    """
    node = _fitted_link(hardware.node, [run for run in runs if run.hosts == 1])
    network = _fitted_link(hardware.network, [run for run in runs if run.hosts > 1])
    return replace(hardware, node=node, network=network, fitted=True)


def fitted_step(hardware: Hardware, *, measured: float, predicted: float) -> Hardware:
    """Return ``hardware`` whose steps take as long as one that was measured.

    Args:
        hardware: With the factor that ``predicted`` was computed with.
        measured: Seconds of a step of some layout.
        predicted: What is predicted for the same layout.

    Raises:
        ConfigError: If the measured time is not above 0.
    """
    if measured <= 0:
        raise ConfigError(f"--measured-step takes seconds above 0, got {measured:g}.")
    factor = hardware.step_factor * measured / predicted
    return replace(hardware, step_factor=factor, fitted=True)


def _fitted_link(link: Link, runs: list[Run]) -> Link:
    exchanges = [run for run in runs if run.test in ("alltoall", "sendrecv")]
    rings = [run for run in runs if run.test not in ("alltoall", "sendrecv")]
    if rings:
        latency, bandwidth = _line([(1.0, run) for run in rings])
        link = replace(link, ring_gb_s=bandwidth, ring_latency_us=latency)
    if len({run.peers for run in exchanges}) > 1:
        link = _with_peers(link, exchanges)
    elif exchanges:
        intercept, bandwidth = _line([(1.0, run) for run in exchanges])
        latency = min(link.alltoall_latency_us, intercept)
        link = replace(
            link,
            alltoall_gb_s=bandwidth,
            alltoall_latency_us=latency,
            peer_us=(intercept - latency) / max(1, exchanges[0].peers),
        )
    return link


def _with_peers(link: Link, runs: list[Run]) -> Link:
    """Fit latency and cost of a peer from the intercepts of runs with different peers."""
    by_peers: dict[int, list[Run]] = {}
    for run in runs:
        by_peers.setdefault(run.peers, []).append(run)
    points = {peers: _line([(1.0, run) for run in some]) for peers, some in by_peers.items()}
    mean_x = sum(points) / len(points)
    mean_y = sum(intercept for intercept, _ in points.values()) / len(points)
    spread = sum((peers - mean_x) ** 2 for peers in points)
    slope = sum((p - mean_x) * (y - mean_y) for p, (y, _) in points.items()) / spread
    peer = max(0.0, slope)
    bandwidth = min(bandwidth for _, bandwidth in points.values())
    return replace(
        link,
        alltoall_gb_s=bandwidth,
        alltoall_latency_us=max(0.0, mean_y - peer * mean_x),
        peer_us=peer,
    )


def _line(weighted: list[tuple[float, Run]]) -> tuple[float, float]:
    """Return latency (us) and bandwidth (GB/s) of ``time = latency + bytes / bandwidth``."""
    a = b = c = d = e = 0.0
    for weight, run in weighted:
        for row in run.rows:
            scale = weight / row.microseconds**2  # relative errors
            x = row.num_bytes * run.share
            a, b, c = a + scale, b + scale * x, c + scale * x * x
            d, e = d + scale * row.microseconds, e + scale * x * row.microseconds
    determinant = a * c - b * b
    slope = (a * e - b * d) / determinant if determinant else 0.0
    if slope <= 0:
        tests = ", ".join(sorted({f"{run.test}_perf" for _, run in weighted}))
        raise ConfigError(
            f"The times of {tests} do not grow with the message, so that no bandwidth can be "
            "fitted. Measure larger messages: -e 1G."
        )
    latency = max(0.0, (c * d - b * e) / determinant)
    return latency, 1e-3 / slope
