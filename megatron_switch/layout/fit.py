"""Fit the links of a cluster to what nccl-tests measured on it, and the step to a measured one.

Reads the text that ``alltoall_perf``, ``all_reduce_perf``, ``all_gather_perf``,
``reduce_scatter_perf`` and ``sendrecv_perf`` print, one or several of them in a file. Each row is a
message size and its time (out of place, microseconds). Ranks and hosts are counted in the lines
``# Rank ... on HOST``; the test's name stands in ``# Collective test starting: NAME``, or in a line
with the command itself.

The model of a row is ``time = latency + peers x peer + wire bytes / bandwidth``, where wire bytes
are what a rank sends on the slower link. Its terms are fitted by least squares of relative errors,
so that small messages decide the latency and large ones the bandwidth. Latency and the time a peer
costs can be told apart only by runs with different numbers of peers; with one run the latency of
the hardware file stays, and the rest is the peers'.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_switch.errors import ConfigError
from megatron_switch.layout.hardware import Hardware, Link

_NAMES = "alltoall|all_reduce|all_gather|reduce_scatter|sendrecv"
_TEST = re.compile(rf"({_NAMES})_perf")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b.*\bon\s+(\S+)\s+device\b")
_LEAST_ROWS = 2


@dataclass(frozen=True)
class Row:
    """One measured message size."""

    num_bytes: int
    microseconds: float


@dataclass(frozen=True)
class Run:
    """One run of a test.

    Attributes:
        test: Name without ``_perf``.
        ranks: Ranks that took part.
        hosts: Hosts they ran on.
        rows: Sizes and times.
    """

    test: str
    ranks: int
    hosts: int
    rows: tuple[Row, ...]

    @property
    def peers(self) -> int:
        """Ranks of other hosts, or of the same where there is one, that each rank sends to."""
        return self.ranks - (self.ranks // self.hosts if self.hosts > 1 else 1)

    @property
    def share(self) -> float:
        """Bytes on the slower link over the size that nccl-tests prints."""
        if self.test == "alltoall":
            return self.peers / self.ranks
        if self.test == "sendrecv":
            return 1.0
        return (2 if self.test == "all_reduce" else 1) * (self.ranks - 1) / self.ranks


def read_runs(path: Path) -> list[Run]:
    """Return the runs in a file of nccl-tests output.

    Raises:
        ConfigError: If the file cannot be read, or a part of it is no such output; with the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--fit reads nccl-tests output, and {path} cannot be: {error}."
        ) from error
    runs: list[Run] = []
    test, hosts, rows = "", dict[int, str](), list[Row]()
    for number, line in enumerate(lines, 1):
        name, rank = _TEST.search(line), _RANK.match(line)
        if name is not None:
            runs += _finished(test, hosts, rows, path, number)
            test, hosts, rows = name[1], {}, []
        elif rank is not None:
            hosts[int(rank[1])] = rank[2]
        elif line.strip() and not line.lstrip().startswith("#") and line.split()[0].isdigit():
            rows.append(_row(line, path, number))
    runs += _finished(test, hosts, rows, path, len(lines))
    if not runs:
        raise ConfigError(
            f"--fit found no nccl-tests output in {path}: no line with a test's name such as "
            "alltoall_perf. Give the text that the tests print, header included."
        )
    return runs


def fitted_hardware(hardware: Hardware, runs: Sequence[Run]) -> Hardware:
    """Return ``hardware`` with the links that the runs measured.

    Raises:
        ConfigError: If times do not grow with sizes, so that no bandwidth can be told.
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


def _finished(
    test: str, hosts: dict[int, str], rows: list[Row], path: Path, number: int
) -> list[Run]:
    if not rows:
        return []
    if not hosts:
        raise ConfigError(
            f"{path}, before line {number}: {test}_perf lacks the lines '# Rank ... on HOST device "
            "...', from which ranks and hosts are counted. Keep the header of the output."
        )
    if len(rows) < _LEAST_ROWS:
        raise ConfigError(
            f"{path}, before line {number}: {test}_perf has one size only, and a latency and a "
            "bandwidth need two. Run it over a range: -b 8K -e 1G -f 2."
        )
    return [Run(test, len(hosts), len(set(hosts.values())), tuple(rows))]


def _row(line: str, path: Path, number: int) -> Row:
    """Return size and out-of-place time: the first column, and the sixth (after the root)."""
    columns = line.split()
    try:
        row = Row(int(columns[0]), float(columns[5]))
    except (IndexError, ValueError):
        raise ConfigError(
            f"{path}, line {number}: expected size, count, type, redop, root and time, found "
            f"'{line.strip()}'."
        ) from None
    if row.microseconds <= 0:
        raise ConfigError(f"{path}, line {number}: a time must be above 0, found '{line.strip()}'.")
    return row


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
            "told. Measure larger messages: -e 1G."
        )
    latency = max(0.0, (c * d - b * e) / determinant)
    return latency, 1e-3 / slope
