"""One record per training step, kept as JSON Lines: one JSON object per line.

The lines are strict JSON. JSON has no NaN and no infinities, so they stand as the strings "NaN",
"Infinity" and "-Infinity". A record is complete once its line break is on disk; whatever follows
the last line break was cut off by the death of the writing process.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import operator
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from distmp.errors import DistmpError
from distmp.utils.files import replacing

# Records of about 400 bytes each.
MOST_WAITING = 100_000

logger = logging.getLogger("distmp")


class RecordError(DistmpError, ValueError):
    """A line of a record file that is not a step record."""


@dataclass(frozen=True)
class StepRecord:
    """What is known about one step, the same on every rank except for `memory_bytes`.

    Attributes:
        step: Number of the step, counted from 1; skipped steps count.
        samples: Samples consumed by the whole job, or passed over, this step included.
        loss: Mean loss over the global batch.
        weight: Tokens or samples in the global batch over which `loss` is the mean.
        grad_norm: Norm of the unscaled gradient before clipping; not finite on an overflow.
        learning_rate: Learning rate of the step.
        loss_scale: Loss scale under which the step was computed.
        skipped: Whether the update was skipped.
        skipped_total: Skipped steps so far, this one included.
        applied_total: Applied updates so far, this one included.
        tokens_per_second: Tokens of the global batch per second, over all ranks.
        step_seconds: Wall time of the step, without pauses for validation.
        memory_bytes: Peak memory of the recording rank, in bytes.
        validation_loss: Validation loss after this step, where there was a validation.
        dropped: Microbatches of all ranks that were left out because they were not finite.
        overflow: What is known about the cause of a skipped step. Values JSON can hold; floats
            that are not finite come back as strings, since a string may stand here too.
        divergence: What was out of bounds in this step (`problem`, `action`), and in the first step
            after a rollback what it was and where the run came from (`rolled_back`).
        rank_seconds: Seconds that each rank took by itself, where ranks were compared after this
            step; NaN for a rank that was not measured.
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
    tokens_per_second: float
    step_seconds: float
    memory_bytes: int
    validation_loss: float | None = None
    dropped: int = 0
    overflow: dict[str, Any] | None = None
    divergence: dict[str, Any] | None = None
    rank_seconds: list[float] | None = None


class RecordWriter:
    """Appends step records to a file, each on disk (in the system's cache) when `write` returns.

    No run ends for its records. While they cannot be written, on a full disk for one, they wait in
    memory, up to `MOST_WAITING`, and follow as soon as there is room. A file that has vanished is
    made again.

    Args:
        path: The file; it and its folder are created where missing.
        resume_after_step: Drop records of later steps first, so that a run resumed after that
            step has every step once (0 drops all). None keeps every complete record.
        complain: Where to say that records cannot be written, and when they can again.

    Raises:
        RecordError: If an existing line is not a step record.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        resume_after_step: int | None,
        complain: Callable[[str], None] = logger.warning,
    ) -> None:
        self._path = Path(path)
        self._last_kept = math.inf if resume_after_step is None else resume_after_step
        self._complain = complain
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._file: FileIO | None = None
        self._size = 0  # of the complete records in the file
        self._failing = False
        self._write_waiting()

    def write(self, record: StepRecord) -> None:
        """Append one record, after those that wait.

        Raises:
            TypeError: If a mapping in it holds something that JSON cannot.
        """
        self._waiting.append(_line(record))
        self._write_waiting()

    def close(self) -> None:
        """Close the file; what waits is lost, and that is said."""
        if self._waiting:
            self._complain(f"{len(self._waiting)} records are lost: {self._path} has no room")
        if self._file is not None:
            self._file.close()

    def _write_waiting(self) -> None:
        try:
            file = self._opened()
            while self._waiting:
                self._append(file, self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._failing:
                self._complain(
                    f"cannot write {self._path}: {error}; the run goes on, and step records wait "
                    "in memory"
                )
            self._failing = True
            return
        if self._failing:
            self._complain(f"step records are written to {self._path} again")
        self._failing = False

    def _opened(self) -> FileIO:
        """Return the file, opened anew if there is no longer one of this name."""
        if self._file is not None and _is_gone(self._file, self._path):
            self._complain(f"{self._path} has vanished; later records go to a new file")
            self._file.close()
            self._file = None
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                _drop_later_records(self._path, self._last_kept)
                self._last_kept = math.inf
            self._file = FileIO(self._path, "ab")
            self._size = os.fstat(self._file.fileno()).st_size
        return self._file

    def _append(self, file: FileIO, line: bytes) -> None:
        """Append a whole line or nothing."""
        if os.fstat(file.fileno()).st_size > self._size:
            file.truncate(self._size)  # what has not been written whole
        if file.write(line) < len(line):
            file.truncate(self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _is_gone(file: FileIO, path: Path) -> bool:
    """Whether `path` no longer names the open file."""
    try:
        return not os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return True


def read_records(path: str | os.PathLike[str]) -> list[StepRecord]:
    """Read all complete records, in the order in which they were written.

    A last line without a line break is ignored, and so are fields this version does not know.

    Raises:
        RecordError: If a complete line is not a step record; names the file and the line.
        FileNotFoundError: If there is no such file.
    """
    with Path(path).open("rb") as file:
        return [_record(path, number, line) for number, line in _complete_lines(file)]


def _drop_later_records(path: Path, last_step: float) -> None:
    with path.open("rb") as old, replacing(path) as new:
        for number, line in _complete_lines(old):
            if _record(path, number, line).step <= last_step:
                new.write(line)


def _complete_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(file, 1) if line.endswith(b"\n"))


def _line(record: StepRecord) -> bytes:
    values = {name: _strict(getattr(record, name)) for name in _CONVERTERS}
    return json.dumps(values, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _strict(value: Any) -> Any:
    """Replace every NaN and infinity, however deep, by its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def _record(path: str | os.PathLike[str], number: int, line: bytes) -> StepRecord:
    try:
        values = json.loads(line)
        known = {n: convert(values[n]) for n, convert in _CONVERTERS.items() if n in values}
        return StepRecord(**known)
    except (ValueError, TypeError) as error:
        message = f"{os.fspath(path)}, line {number}: not a step record ({error})"
        raise RecordError(f"{message}; mend or delete that line") from error


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _optional_mapping(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, (dict, type(None))):
        raise TypeError(f"{value!r} is not an object")
    return value


def _optional_floats(value: Any) -> list[float] | None:
    if not isinstance(value, (list, type(None))):
        raise TypeError(f"{value!r} is not a list")
    return None if value is None else [float(item) for item in value]


_CONVERTER_OF_TYPE: dict[str, Callable[[Any], Any]] = {
    "int": operator.index,
    "float": float,  # reads "NaN", "Infinity" and "-Infinity" too
    "bool": _boolean,
    "float | None": _optional_float,
    "dict[str, Any] | None": _optional_mapping,
    "list[float] | None": _optional_floats,
}
_CONVERTERS = {
    field.name: _CONVERTER_OF_TYPE[str(field.type)] for field in dataclasses.fields(StepRecord)
}
