"""One record per training step, stored as JSON Lines: one JSON object per line.

The lines are strict JSON. JSON has no NaN and no infinities, so they are written as the strings
"NaN", "Infinity" and "-Infinity". A record is complete once its line break is on disk; data after
the last line break is an incomplete record of a process that was killed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from distmp.errors import DistmpError
from distmp.utils.files import replacing

# Maximum number of buffered records, of about 400 bytes each.
MAX_BUFFERED = 100_000


class RecordError(DistmpError, ValueError):
    """A line of a record file that is not a step record."""


@dataclass(frozen=True)
class StepRecord:
    """The record of one step; times and memory are those of the recording rank.

    Attributes:
        step: Number of the step, counted from 1; skipped steps count.
        samples: Number of samples consumed or skipped by all ranks, including this step.
        loss: Mean loss over the global batch.
        weight: Number of tokens or samples in the global batch over which `loss` is the mean.
        grad_norm: Norm of the unscaled gradient before clipping; not finite after an overflow.
        learning_rate: Learning rate of the step.
        loss_scale: Loss scale under which the step was computed.
        skipped: Whether the update was skipped.
        skipped_total: Number of skipped steps so far, including this one.
        applied_total: Number of applied updates so far, including this one.
        weight_per_second: Weight of the global batch divided by the time of the step: tokens or
            samples per second, over all ranks.
        step_seconds: Wall time of the step, without pauses for validations, saves and rollbacks.
        memory_bytes: Peak memory of the recording rank, in bytes.
        validation_loss: Validation loss after this step, or None without a validation.
        dropped: Number of microbatches of all ranks that were dropped because of non-finite
            gradients.
        overflow: The cause of a skipped step, as JSON values. Here and in the other mappings, the
            texts "NaN", "Infinity" and "-Infinity" are read back as floats.
        divergence: What was out of bounds in this step (`problem`, `action`), and in the first step
            after a rollback its cause and origin (`rolled_back`).
        unit: What the weight counts, in the singular: "token", "sample" or another word.
        rank_seconds: Compute time of each rank in seconds, if ranks were compared after this step;
            NaN for a rank that was not measured.
        validation_metrics: Metrics of the validation after this step, by name; None without one.
        formats: The policy of `precision.phases` in this step; None without phases.
        low_precision_operands: How well the operands of low-precision matmuls fit their formats,
            every `log.every` steps and in the first, last and skipped ones: by "input", "weight",
            "grad", "wgrad_input" and "wgrad_grad" the shares "saturated" (or not finite) and
            "underflowed" (rounded to zero) over all ranks, the "largest" magnitude on the first
            rank, and the layers that are "most_saturated" and "most_underflowed".
    """

    step: int
    samples: int
    loss: float
    weight: float
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool
    skipped_total: int
    applied_total: int
    weight_per_second: float
    step_seconds: float
    memory_bytes: int
    validation_loss: float | None = None
    dropped: int = 0
    overflow: dict[str, Any] | None = None
    divergence: dict[str, Any] | None = None
    unit: str = "token"
    rank_seconds: list[float] | None = None
    validation_metrics: dict[str, float] | None = None
    formats: str | None = None
    low_precision_operands: dict[str, Any] | None = None


class RecordWriter:
    """Appends step records to a file; each is in the system's page cache when `write` returns.

    An error while writing does not end the run. While records cannot be written, for example on a
    full disk, up to `MAX_BUFFERED` of them are buffered in memory and written later. A deleted file
    is created again.

    Args:
        path: The file; it and its directory are created if missing.
        resume_after_step: First drop records of later steps, so that a run resumed after that
            step has every step once (0 drops all). Until `saved`, another file keeps them: their
            checkpoints are still valid, and a run that resumes from one gets them back.
        warn: Called with a message when records cannot be written, and when they can again.

    Raises:
        RecordError: If an existing line is not a step record.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        resume_after_step: int,
        warn: Callable[[str], None],
    ) -> None:
        self._path = Path(path)
        self._abandoned = self._path.with_name(f"{self._path.name}.abandoned")
        # What to drop when the file is opened next; None appends to the file as it is.
        self._last_kept: float | None = resume_after_step
        self._warn = warn
        self._buffered: deque[bytes] = deque(maxlen=MAX_BUFFERED)
        self._file: FileIO | None = None
        self._size = 0  # of the complete records in the file
        self._failing = False
        with suppress(OSError):  # `_flush` tries again, and warns
            self._keep_abandoned(resume_after_step)
            self._opened()
        self._flush()

    def write(self, record: StepRecord) -> None:
        """Append one record after the buffered ones.

        Raises:
            TypeError: If a mapping in it contains a value that JSON does not support.
        """
        self._buffered.append(_line(record))
        self._flush()

    def rewind(self, last_step: int, *new: StepRecord) -> None:
        """Replace the records of later steps by new ones, atomically."""
        if self._file is not None:
            self._file.close()
        kept = [line for line in self._buffered if json.loads(line)["step"] <= last_step]
        self._buffered = deque([*kept, *map(_line, new)], MAX_BUFFERED)
        pending = math.inf if self._last_kept is None else self._last_kept
        self._file, self._last_kept = None, min(last_step, pending)
        self._flush()

    def add_validation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Add the numbers of a validation to the record of the last step, if that is `step`."""
        try:
            buffered = [_record(self._path, 0, line) for line in [*self._buffered][-1:]]
            last = buffered or read_records(self._path)[-1:]
        except (OSError, RecordError) as error:
            self._warn(f"the validation after step {step} is not recorded: {error}")
            return
        if last and last[0].step == step:
            own = dict(metrics) or None
            new = dataclasses.replace(last[0], validation_loss=loss, validation_metrics=own)
            self.rewind(step - 1, new)

    def saved(self) -> None:
        """Delete the dropped records: the run has saved a checkpoint since, and goes on from it."""
        with suppress(OSError):
            self._abandoned.unlink()

    def close(self) -> None:
        """Write buffered records, or warn that they are lost, and close the file."""
        if self._buffered:
            self._flush()
        if self._buffered:
            self._warn(f"{len(self._buffered)} records are lost: cannot write {self._path}")
        if self._file is not None:
            self._file.close()

    def _keep_abandoned(self, last_step: int) -> None:
        """Copy records that will be dropped, or take them back if the run continues from them."""
        reached = max((r.step for r in read_records(self._path)), default=0)
        kept = self._abandoned.exists()
        if reached < last_step and kept:
            _copy(self._abandoned, self._path)
        elif reached > last_step and not kept:
            _copy(self._path, self._abandoned)

    def _flush(self) -> None:
        try:
            file = self._opened()
            while self._buffered:
                self._append(file, self._buffered[0])
                self._buffered.popleft()
        except (OSError, RecordError) as error:
            if not self._failing:
                self._warn(
                    f"cannot write {self._path}: {error}; training continues, and step records "
                    "are buffered in memory"
                )
            self._failing = True
            return
        if self._failing:
            self._warn(f"step records are written to {self._path} again")
        self._failing = False

    def _opened(self) -> FileIO:
        """Return the open file, or a new one if the path no longer names it."""
        if self._file is not None and _is_gone(self._file, self._path):
            self._warn(f"{self._path} has vanished; later records go to a new file")
            self._file.close()
            self._file = None
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._last_kept is not None and self._path.exists():
                _replace_later_records(self._path, self._last_kept, self._buffered)
                self._buffered.clear()
            self._last_kept = None
            file = FileIO(self._path, "ab")
            self._size = sum(len(line) for _, line in _complete_lines(self._path))
            self._file = file  # last, because an error of a read must not leave another size
        return self._file

    def _append(self, file: FileIO, line: bytes) -> None:
        """Append a complete line or nothing."""
        if os.fstat(file.fileno()).st_size > self._size:
            file.truncate(self._size)  # remove an incomplete line
        rest = line
        try:
            while rest:  # the write after an incomplete one raises its cause
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(self._size)
            raise
        self._size += len(line)


def _is_gone(file: FileIO, path: Path) -> bool:
    """Whether `path` no longer names the open file."""
    try:
        return not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return True


def read_records(path: str | os.PathLike[str]) -> list[StepRecord]:
    """Read all complete records in the order of the file.

    Ignores a last line without a line break, and fields that this version does not know.

    Raises:
        RecordError: If a complete line is not a step record; names the file and the line.
        FileNotFoundError: If the file does not exist.
    """
    return [_record(path, number, line) for number, line in _complete_lines(path)]


def _replace_later_records(path: Path, last_step: float, new_lines: Iterable[bytes]) -> None:
    """Keep one record of each step up to the last one, and append others."""
    kept: set[int] = set()
    with replacing(path) as new:
        for number, line in _complete_lines(path):
            step = _record(path, number, line).step
            if step <= last_step and step not in kept:
                kept.add(step)
                new.write(line)
        new.writelines(new_lines)


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as file:
        file.write(source.read_bytes())


def _complete_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    with Path(path).open("rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.endswith(b"\n"))


def _line(record: StepRecord) -> bytes:
    fields = {name: getattr(record, name) for name in _TYPES}
    values = _renamed(fields, lambda value: _NAMES.get(repr(value), value))
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _record(path: str | os.PathLike[str], number: int, line: bytes) -> StepRecord:
    try:
        values = json.loads(line)
        return StepRecord(**{n: _read(values[n], t) for n, t in _TYPES.items() if n in values})
    except (ValueError, TypeError) as error:
        message = f"{os.fspath(path)}, line {number}: not a step record ({error})"
        raise RecordError(f"{message}; fix or delete that line") from error


def _read(value: Any, kind: str) -> Any:
    """Return the value of a field; floats in mappings and lists may be named by their text."""
    if kind == "int":
        return operator.index(value)
    if kind == "float" or (kind == "float | None" and value is not None):
        return float(value)  # also of "NaN", "Infinity" and "-Infinity"
    return value if kind.startswith("str") else _renamed(value, lambda v: _NAMED.get(v, v))


def _renamed(value: Any, rename: Callable[[Any], Any]) -> Any:
    """Apply a function to every value in mappings and lists, at any depth."""
    if isinstance(value, dict):
        return {key: _renamed(item, rename) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_renamed(item, rename) for item in value]
    return rename(value)


_NAMED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NAMES = {repr(value): name for name, value in _NAMED.items()}
_TYPES = {field.name: str(field.type) for field in dataclasses.fields(StepRecord)}
