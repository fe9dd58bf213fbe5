"""One record per iteration, as JSON lines, fed by what Megatron writes to TensorBoard.

Megatron's loop has no hook for per-iteration values except its TensorBoard writer: loss, gradient
norm and learning rate pass through ``add_scalar`` on the last rank, each iteration. A
:class:`StepWriter` takes the writer's place, forwards everything to the real one, and joins the
values with the routing report of the same iteration. An evaluation has a record of its own, of the
same form without what only a training step has; its router losses are those of its own tokens.
``after_training`` says of a validation whether it followed the last step: at the last iteration
there are two, of different batches. A warning about routing is a record of the kind ``warning``.

A training record has the time of day (UTC), the seconds of a step, and the tokens that the run has
read since its beginning. Before the first record of each start there is one of the kind ``start``.

A run that resumes at iteration N drops the records from N on that an interrupted run had written
already, so that every iteration is in the file once; TensorBoard's files likewise. The file is
strict JSON: a value that is not finite, such as the gradient norm of a skipped fp16 step, is null.
"""

import json
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_switch.moe.metrics.routing_counts import RoutingReport
from megatron_switch.training.logs.evaluation_names import (
    AFTER_TRAINING,
    VALIDATION,
    name_of_set,
    named_tag,
)
from megatron_switch.training.logs.tensorboard_files import drop_from
from megatron_switch.utils.atomic_file import renamed_into_place

SCHEMA = "megatron-switch/metrics/1"
_NAMES = {"lm loss": "lm_loss", "grad-norm": "grad_norm", "learning-rate": "learning_rate"}
_BATCH_SIZE = "batch-size"
_SAMPLES = "learning-rate vs samples"  # its step is the number of samples
_VALIDATION_LOSS = re.compile(r"lm loss validation(?P<name>-\S+)?$")  # several sets have names


class MetricsFile:
    """JSON-lines file that is appended to, one complete line at a time.

    Args:
        path: File to write; created with its folder when the first record comes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = False

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; ``schema`` and ``iteration`` come first."""
        if not self._started:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._drop_from(record)
            self._started = True
            before = record["iteration"] - (record["kind"] == "train")
            self.write({"iteration": before, "kind": "start", "time": _now()})
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"schema": SCHEMA, **record}, allow_nan=False) + "\n")

    def _drop_from(self, record: dict[str, Any]) -> None:
        if not self._path.exists():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _place_of_line(line) < _place(record)]
        if len(kept) < len(lines):
            with renamed_into_place(self._path) as file:
                file.writelines(line + "\n" for line in kept)


class StepWriter:
    """Takes the place of Megatron's TensorBoard writer on the last rank.

    Args:
        tensorboard: The real writer, or None without ``--tensorboard-dir``.
        tensorboard_folder: Folder of the real writer.
        metrics: Where records go, or None without a metrics file.
        sequence_length: Tokens of a sample, for throughput.
        array_interval: Iterations between records with per-layer and per-expert arrays.
        clock: Returns the seconds spent in training iterations so far.
    """

    def __init__(
        self,
        tensorboard: Any,
        metrics: MetricsFile | None,
        *,
        tensorboard_folder: Path | None = None,
        sequence_length: int,
        array_interval: int,
        clock: Callable[[], float],
    ) -> None:
        self._tensorboard = tensorboard
        self._metrics = metrics
        self._sequence_length = sequence_length
        self._array_interval = array_interval
        self._clock = clock
        self._last_time = 0.0
        self._last_step: int | None = None
        self._record: dict[str, Any] = {}
        self._evaluated: tuple[str, float | None] = ("", None)
        self._evaluation = VALIDATION
        self._old_events = None if tensorboard is None else tensorboard_folder

    def begin_evaluation(self, evaluation: str) -> None:
        """Note which evaluation the values that Megatron calls "validation" are of.

        Args:
            evaluation: One of the names of :mod:`megatron_switch.training.logs.evaluation_names`.
        """
        self._evaluation = evaluation

    def add_scalar(self, tag: str, value: Any, step: int, *args: Any, **kwargs: Any) -> None:
        """Forward to TensorBoard, and keep what belongs to the iteration's record."""
        self._write_scalar(named_tag(tag, self._evaluation), value, step, *args, **kwargs)
        if tag in _NAMES:
            self._record_of(step)[_NAMES[tag]] = _finite(value)
        elif tag == _BATCH_SIZE:
            self._record_of(step).update(self._speed(int(value), step))
        elif tag == _SAMPLES and self._record:
            self._record["consumed_tokens"] = step * self._sequence_length
        elif match := _VALIDATION_LOSS.match(tag):
            self._evaluated = match["name"] or "", _finite(value)

    def _write_scalar(self, tag: str, value: Any, step: int, *args: Any, **kwargs: Any) -> None:
        if self._tensorboard is None:
            return
        if self._old_events is not None:
            drop_from(self._old_events, step)
            self._old_events = None
        self._tensorboard.add_scalar(tag, value, step, *args, **kwargs)

    def add_routing(self, report: RoutingReport, iteration: int) -> None:
        """Complete the record of an iteration with its routing.

        With ``--tensorboard-log-interval`` above 1 most iterations have no record.
        """
        if self._record.get("iteration") != iteration:
            return
        self._record.update(_routing_scalars(report))
        if iteration % self._array_interval == 0:
            self._record.update(_routing_arrays(report))
        self.finish_iteration()

    def finish_iteration(self) -> None:
        """Write the current record, if there is one."""
        record, self._record = self._record, {}
        if record and self._metrics is not None:
            self._metrics.write(record)

    def add_warning(self, text: str, iteration: int) -> None:
        """Write a record of a warning, beside the losses that it is about."""
        self.finish_iteration()
        if self._metrics is not None:
            self._metrics.write({"iteration": iteration, "kind": "warning", "text": text})

    def _record_of(self, step: int) -> dict[str, Any]:
        """Return the current record, a new one where an iteration begins."""
        if self._record.get("iteration") != step:
            self.finish_iteration()
            self._record = {
                "iteration": step,
                "kind": "train",
                "time": _now(),
                **dict.fromkeys(_NAMES.values()),
            }
        return self._record

    def _speed(self, batch_size: int, step: int) -> dict[str, float]:
        """Return seconds of a step and tokens per second since the last record."""
        now = self._clock()
        steps = 1 if self._last_step is None else step - self._last_step
        seconds = (now - self._last_time) / steps
        self._last_step, self._last_time = step, now
        rate = batch_size * self._sequence_length / seconds
        return {"step_seconds": seconds, "tokens_per_second": rate}

    def add_evaluation(
        self, report: RoutingReport | None, iteration: int
    ) -> dict[str, float | None]:
        """Write the record of the evaluation in progress: its loss, and how tokens were routed.

        The router's losses are those of the evaluated tokens, raw, and no part of ``lm_loss``.

        Returns:
            The logged values of the routing, by name.
        """
        self.finish_iteration()
        (of_set, loss), self._evaluated = self._evaluated, ("", None)
        scalars: dict[str, float | None] = {}
        if report is not None:
            scalars = _routing_scalars(report)
        label = name_of_set(self._evaluation, of_set)
        for name, value in scalars.items():
            self._write_scalar(f"{name} {label}", value, iteration)
        if self._metrics is not None:
            record: dict[str, Any] = {"iteration": iteration, "kind": label}
            if self._evaluation in (VALIDATION, AFTER_TRAINING):
                record["kind"] = VALIDATION + of_set
                record["after_training"] = self._evaluation == AFTER_TRAINING
            self._metrics.write({**record, "lm_loss": loss, **scalars})
        return {f"{name} {label}": value for name, value in scalars.items()}

    def __getattr__(self, name: str) -> Any:
        """Return every other method of TensorBoard's writer, or without one a no-op."""
        if name.startswith("__"):
            raise AttributeError(name)
        return _ignore if self._tensorboard is None else getattr(self._tensorboard, name)


def _routing_scalars(report: RoutingReport) -> dict[str, float | None]:
    return {
        f"{name}_fraction" if name.endswith("dropped") else name: _finite(value)
        for name, value in report.scalars().items()
    }


def _routing_arrays(report: RoutingReport) -> dict[str, Any]:
    arrays: dict[str, Any] = {"layers": list(report.layer_numbers)}
    if report.encoder_layers:  # layers up to this number are the encoder's
        arrays["encoder_layers"] = report.encoder_layers
    arrays |= {f"{name}_by_layer": values for name, values in report.per_layer().items()}
    arrays["expert_load"] = report.load_LE.tolist()
    return arrays


def _finite(value: Any) -> float | None:
    """Return a number, or a tensor that holds one, as JSON can hold it."""
    number = float(value)
    return number if math.isfinite(number) else None


def _place(record: dict[str, Any]) -> tuple[int, bool]:
    """Return a record's sort key in the file: an iteration, then its evaluations."""
    return record["iteration"], record["kind"] != "train"


def _place_of_line(line: str) -> tuple[int, bool]:
    """Return the sort key of a line; a truncated line counts as the newest."""
    try:
        return _place(json.loads(line))
    except (ValueError, KeyError):
        return 2**62, True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _ignore(*_: Any, **__: Any) -> None:
    """Replace a TensorBoard method where there is no TensorBoard."""
