"""What nccl-tests measured, from the text that they print or from the JSON of their ``-J FILE``.

Text may hold several of ``alltoall_perf``, ``all_reduce_perf``, ``all_gather_perf``,
``reduce_scatter_perf`` and ``sendrecv_perf``. Each row is a message size and its time (out of
place, microseconds). Ranks, groups and hosts are counted in the lines ``# Rank ... on HOST``; the
test's name stands in ``# Collective test starting: NAME``, or in a line with the command itself.

A JSON file (version 3, of nccl-tests 2.19) holds one test: its name in ``args``, rows in
``results``, and in ``config.devices`` the first rank of each process, which has ``nthreads`` x
``ngpus`` of them.

Where a test ran in several groups at once (``NCCL_TESTS_SPLIT``), a run is of one of them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron_switch.errors import ConfigError
from megatron_switch.utils.fields import Fields

_NAMES = "alltoall|all_reduce|all_gather|reduce_scatter|sendrecv"
_TEST = re.compile(rf"({_NAMES})_perf")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b(?:\s+Group\s+(\d+))?.*\bon\s+(\S+)\s+device\b")
_LEAST_ROWS = 2


@dataclass(frozen=True)
class MessageTime:
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
    rows: tuple[MessageTime, ...]

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


@dataclass(frozen=True)
class _Place:
    """Where a rank ran, and in which of the groups that ran at once."""

    group: int
    host: str


def read_runs(path: Path) -> list[Run]:
    """Return the runs in a file of nccl-tests output, text or JSON.

    Raises:
        ConfigError: If the file cannot be read, or a part of it is no such output; with line
            or key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--fit reads nccl-tests output, and {path} cannot be: {error}."
        ) from error
    if text.lstrip().startswith("{"):
        return [_run_of_json(path)]
    return _runs_of_text(text.splitlines(), path)


def _runs_of_text(lines: list[str], path: Path) -> list[Run]:
    runs: list[Run] = []
    test, places, rows = "", dict[int, _Place](), list[MessageTime]()
    for number, line in enumerate(lines, 1):
        name, rank = _TEST.search(line), _RANK.match(line)
        if name is not None:
            runs += _finished(test, places, rows, path, number)
            test, places, rows = name[1], {}, []
        elif rank is not None:
            places[int(rank[1])] = _Place(int(rank[2] or 0), rank[3])
        elif line.strip() and not line.lstrip().startswith("#") and line.split()[0].isdigit():
            rows.append(_row(line, path, number))
    runs += _finished(test, places, rows, path, len(lines))
    if not runs:
        raise ConfigError(
            f"--fit found no nccl-tests output in {path}: no line with a test's name such as "
            "alltoall_perf. Give the text that the tests print, header included, or the file of "
            "their -J."
        )
    return runs


def _finished(
    test: str, places: dict[int, _Place], rows: list[MessageTime], path: Path, number: int
) -> list[Run]:
    if not rows:
        return []
    if not places:
        raise ConfigError(
            f"{path}, before line {number}: {test}_perf lacks the lines '# Rank ... on HOST device "
            "...', from which ranks and hosts are counted. Keep the header of the output."
        )
    if len(rows) < _LEAST_ROWS:
        raise ConfigError(
            f"{path}, before line {number}: {test}_perf has one size only, and a latency and a "
            "bandwidth need two. Run it over a range: -b 8K -e 1G -f 2."
        )
    return [_run(test, list(places.values()), rows)]


def _run(test: str, places: list[_Place], rows: list[MessageTime]) -> Run:
    """Return the run of the first group; the others did the same at the same time."""
    hosts = [place.host for place in places if place.group == places[0].group]
    return Run(test, len(hosts), len(set(hosts)), tuple(rows))


def _row(line: str, path: Path, number: int) -> MessageTime:
    """Return size and out-of-place time: the first column, and the sixth (after the root)."""
    columns = line.split()
    try:
        row = MessageTime(int(columns[0]), float(columns[5]))
    except (IndexError, ValueError):
        raise ConfigError(
            f"{path}, line {number}: expected size, count, type, redop, root and time, found "
            f"'{line.strip()}'."
        ) from None
    if row.microseconds <= 0:
        raise ConfigError(f"{path}, line {number}: a time must be above 0, found '{line.strip()}'.")
    return row


def _run_of_json(path: Path) -> Run:
    file = Fields.read(path, "nccl-tests file")
    argv = file.texts("args")
    name = _TEST.search(argv[0]) if argv else None
    if name is None:
        raise file.error("args", f"begins with the test, one of {_NAMES.replace('|', ', ')}_perf.")
    config = file.inner("config")
    ranks = config.integer("nthreads", 1) * config.integer("ngpus", 1)
    places = [
        _Place(device.integer("group", 0, least=0), device.text("hostname"))
        for device in config.objects("devices")
        for _ in range(ranks)
    ]
    rows = [_row_of_json(row) for row in file.objects("results")]
    if not places:
        raise config.error("devices", "lists the ranks, and there is none.")
    if len(rows) < _LEAST_ROWS:
        raise file.error(
            "results",
            f"{len(rows)} sizes, and a latency and a bandwidth need two. Run the test over a "
            "range: -b 8K -e 1G -f 2.",
        )
    return _run(name[1], places, rows)


def _row_of_json(row: Fields) -> MessageTime:
    measured = row.inner("out_of_place")
    key = "cpu_time" if "cpu_time" in measured.values else "time"
    microseconds = measured.number(key, above=0)
    return MessageTime(row.integer("size"), microseconds)
