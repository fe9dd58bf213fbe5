"""The result of a layout check, as lines of a table and as JSON.

A cell is the greatest relative deviation, among the values of its column, from the same run on one
rank. Under a row that differs stand the values that do, the worst first, and the tokens that were
routed otherwise; near ties are listed under any row.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_switch.commands.layout_check.cases import Case
from megatron_switch.commands.layout_check.values import Verdict

_SHOWN = 5
"""Values and tokens shown under a row."""

_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "loss": ("loss of ",),
    "aux": ("aux of ",),
    "z": ("z of ",),
    "load": ("load of ", "tokens of ", "dropped of "),
    "router": ("router gradient",),
    "experts": ("expert gradient",),
    "others": ("gradient",),
    "norm": ("norm of ",),
    "clip": ("clip of ",),
    "weights": ("parameter",),
}
"""What stands in each column: values whose name begins so."""

_HEADINGS = ("ranks", "TP", "PP", "VP", "EP", "ETP", "CP", "DP")
_WIDTHS = (5, 2, 2, 2, 2, 3, 2, 2)
_CELL = 7


@dataclass(frozen=True)
class Result:
    """A case and what came of it."""

    case: Case
    verdict: Verdict | None = None
    error: str = ""
    """Why there is no verdict."""

    @property
    def equal(self) -> bool:
        """Whether the case ran and computed what one rank does."""
        return self.verdict is not None and self.verdict.equal

    def cells(self) -> dict[str, float]:
        """Return the value of each column; NaN where there is none."""
        cells = dict.fromkeys(_COLUMNS, math.nan)
        if self.verdict is not None:
            for name, by in self.verdict.deviation.items():
                column = _column_of(name)
                cells[column] = by if math.isnan(cells[column]) else max(cells[column], by)
        return cells

    def as_json(self) -> str:
        """Return one line: the case, its cells, and what differs."""
        verdict = self.verdict
        wrong = {} if verdict is None else verdict.wrong
        record = {
            "ranks": self.case.layout.world_size,
            **self.case.sizes(),
            **self.case.values,
            "equal": self.equal,
            "deviation": {name: _plain(by) for name, by in self.cells().items()},
            "wrong": {name: _plain(by) for name, by in wrong.items()},
            "unlike_tokens": [] if verdict is None else list(verdict.unlike),
            "near_ties": [] if verdict is None else list(verdict.near_ties),
            "error": self.error,
        }
        return json.dumps(record)


def heading() -> str:
    """Return the first line of the table."""
    sizes = [f"{name:>{width}}" for name, width in zip(_HEADINGS, _WIDTHS, strict=True)]
    return " ".join([*sizes, *(f"{name:>{_CELL}}" for name in _COLUMNS), " drops    settings"])


def lines_of(result: Result) -> list[str]:
    """Return the row of a case and, where there is something to say, lines under it."""
    sizes = (result.case.layout.world_size, *result.case.sizes().values())
    cells = [f"{size:>{width}}" for size, width in zip(sizes, _WIDTHS, strict=True)]
    if result.verdict is None:
        return [f"{' '.join(cells)}  FAILED  {_settings(result.case)}", *_indented([result.error])]
    verdict = result.verdict
    cells += [f"{_number(by):>{_CELL}}" for by in result.cells().values()]
    drops = "UNLIKE " if verdict.unlike else "same   "
    end = "" if verdict.equal else "  DIFFERS"
    wrong = [f"{name}: off by {by:.1e}" for name, by in verdict.wrong.items()]
    return [
        f"{' '.join(cells)}  {drops}  {_settings(result.case)}{end}",
        *_indented(wrong),
        *_indented(verdict.unlike),
        *_indented([f"near tie: {text}" for text in verdict.near_ties]),
    ]


def summary(results: Sequence[Result]) -> str:
    """Return the last line: how many cases are equal, and how close the worst of them is."""
    equal = [result for result in results if result.equal]
    worst = max(
        (by for result in equal if result.verdict for by in result.verdict.deviation.values()),
        default=0.0,
    )
    if len(equal) == len(results):
        return f"{len(results)} cases, all equal; the greatest deviation is {worst:.1e}."
    return f"{len(results)} cases, {len(results) - len(equal)} of them NOT equal."


def _column_of(name: str) -> str:
    if name.startswith("gradient"):
        kind = "router " if ".router." in name else "expert " if ".experts." in name else ""
        name = kind + name
    return next(column for column, starts in _COLUMNS.items() if name.startswith(starts))


def _settings(case: Case) -> str:
    return ", ".join(
        f"{value} micro-batches" if factor == "micro_batches" else _told(factor, value)
        for factor, value in case.values.items()
    )


def _told(factor: str, value: str) -> str:
    if factor == "recompute":
        return f"recompute {value}"
    if factor == "evaluation":
        return f"evaluation {value}"
    return value


def _number(by: float) -> str:
    return "-" if math.isnan(by) else f"{by:.0e}"


def _plain(by: float) -> float | None:
    """Return a number that JSON has; None for infinity."""
    return by if math.isfinite(by) else None


def _indented(texts: Sequence[str]) -> list[str]:
    lines = [line for text in texts[:_SHOWN] for line in text.splitlines()]
    if len(texts) > _SHOWN:
        lines.append(f"and {len(texts) - _SHOWN} more")
    return [f"        {line}" for line in lines]
