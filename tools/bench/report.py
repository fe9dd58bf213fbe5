"""What was measured, as tables and as JSON.

Tables are Markdown, so that what a terminal shows can go into a page of documentation as it is.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.measure import PHASES

_MIB = 2**20
TIME_COLUMNS = ("layer", "min ms", "median ms", "/ floor", "/ ours", "differs")
INSIDE_COLUMNS = ("layer", *PHASES, "kept outside experts MiB", "kept MiB", "peak MiB")
NOTE = """\
Forward and backward of one layer. Ratios are between minima: to the fastest floor, and to the
faster of ours. Phases: ms in the fastest of some passes that were watched. Kept: bytes that
autograd saved for backward, weights left out. Peak: bytes beyond those before the pass, gradients
included.
"""


@dataclass(frozen=True)
class Row:
    """One layer or floor of one case. What was left out has a reason and no numbers."""

    name: str
    differs: str
    """Where it is no Switch layer with first-come drops, or why it was left out."""
    median_ms: float | None = None
    minimum_ms: float | None = None
    kept_outside_bytes: int | None = None
    kept_bytes: int | None = None
    peak_bytes: int | None = None
    error: float | None = None
    """Largest relative difference from the plain layer; None for floors."""
    phases_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CaseResult:
    """All rows of one set of sizes."""

    title: str
    sizes: dict[str, Any]
    tokens: int
    """Tokens of rank 0."""
    kept_tokens: int
    """Those of them that have a slot, first come."""
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> "CaseResult":
        """Return what :meth:`write` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(**(values | {"rows": [Row(**row) for row in values["rows"]]}))

    def write(self, path: Path) -> None:
        """Write all numbers as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def minimum_ms(self, start: str) -> float | None:
        """Return the least time of the rows whose names start so; None without one."""
        rows = [row for row in self.rows if row.name.startswith(start)]
        times = [row.minimum_ms for row in rows if row.minimum_ms is not None]
        return min(times, default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers with the ratios of the table."""
        bases = {"to_floor": self.minimum_ms("floor"), "to_ours": self.minimum_ms("ours")}
        rows = [
            asdict(row) | {key: _ratio(row.minimum_ms, base) for key, base in bases.items()}
            for row in self.rows
        ]
        return asdict(self) | {"rows": rows}

    def tables(self) -> tuple[Table, Table]:
        """Return a table of times, and one of phases and memory."""
        times, inside = _table(TIME_COLUMNS), _table(INSIDE_COLUMNS)
        for row in self.as_json()["rows"]:
            times.add_row(
                row["name"],
                *(_number(row[name], 1) for name in ("minimum_ms", "median_ms")),
                *(_number(row[name], 2) for name in ("to_floor", "to_ours")),
                row["differs"],
            )
            if row["kept_bytes"] is not None:
                sizes = (row[name] for name in ("kept_outside_bytes", "kept_bytes", "peak_bytes"))
                inside.add_row(
                    row["name"],
                    *(_number(row["phases_ms"].get(phase), 1) for phase in PHASES),
                    *(_number(size / _MIB, 1) for size in sizes),
                )
        return times, inside

    def print(self, console: Console) -> None:
        """Print both tables under a heading."""
        console.print(f"### {self.title}; {self.kept_tokens} of a rank's {self.tokens} tokens kept")
        for table in self.tables():
            console.print(table)


def _table(columns: tuple[str, ...]) -> Table:
    table = Table(box=box.MARKDOWN)
    for column in columns:
        text = column in ("layer", "differs")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    return table


def _ratio(time_ms: float | None, base_ms: float | None) -> float | None:
    return None if time_ms is None or base_ms is None else time_ms / base_ms


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
