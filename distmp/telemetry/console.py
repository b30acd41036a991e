"""Console output of the first rank: messages, and lines about steps."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Iterator
from typing import TextIO

from distmp.masking import masked_text
from distmp.telemetry.records import StepRecord
from distmp.telemetry.settings import LogConfig
from distmp.utils.units import bytes_text, duration, per_second, quantity, scale_text

logger = logging.getLogger("distmp")


def discard(stream: TextIO) -> None:
    """Redirect a stream's file to the null device.

    This also discards the stream's buffer and output of other code to the same file: otherwise the
    interpreter's last flush would fail and change the exit code.
    """
    # A stream without a file has nothing to flush at exit.
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


def open_standard_streams() -> None:
    """Discard output to streams that were closed when the process started, as by `>&-`.

    Files that are opened later would get their numbers.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  # open until the process ends
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def flush_standard_streams() -> None:
    """Flush standard output and error; discard output that cannot be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the stream or its reader is closed
            discard(stream)


def progress_line(record: StepRecord, total_steps: int, seconds_left: float) -> str:
    """Format one step as a line of aligned columns, the most important ones first.

    Args:
        record: The step.
        total_steps: Number of steps of the run.
        seconds_left: Estimated time of the remaining steps, without validations and saves; not
            finite if unknown.
    """
    digits = len(str(total_steps))
    fields = [
        f"step {record.step:>{digits}}/{total_steps}",
        f"loss {_loss(record.loss):>8}",
        f"{duration(seconds_left):>8} left",
        f"{quantity(record.weight_per_second):>5} {per_second(record.unit)}",
        f"norm {_norm(record.grad_norm):>8}",
        f"skipped {record.skipped_total:>3}",
        f"scale {scale_text(record.loss_scale):>5}",
        f"lr {record.learning_rate:.2e}",
        f"{bytes_text(record.memory_bytes):>8}",
        # Only in some steps, so that the other columns stay in place.
        *_notes(record),
    ]
    return "  ".join(fields)


def _notes(record: StepRecord) -> Iterator[str]:
    if record.validation_loss is not None:
        yield f"validation loss {_loss(record.validation_loss)}"
    for name, value in (record.validation_metrics or {}).items():
        yield f"{name} {_loss(value)}"
    if record.skipped:
        yield "this step skipped"


def _loss(loss: float) -> str:
    return f"{loss:.2e}" if 1000 <= abs(loss) < float("inf") else f"{loss:.4f}"


def _norm(norm: float) -> str:
    return f"{norm:.3f}" if norm == 0 or 0.001 <= norm < 1000 else f"{norm:.2e}"


_STEPS_AVERAGED = 50


class Console:
    """Prints to standard output.

    A closed reader does not end the run: the first error is logged, and all later output to the
    stream is discarded, also that of other code. Characters that its encoding lacks are escaped.

    Args:
        settings: Whether to print, and the number of steps between lines.
        quiet: Print nothing; used on every rank except the first.
        stream: The output stream; default: standard output.
    """

    def __init__(
        self, settings: LogConfig, *, quiet: bool = False, stream: TextIO | None = None
    ) -> None:
        self._every = settings.every
        self._stream = stream or sys.stdout
        self._quiet = quiet or settings.console == "off"
        self._seconds: deque[float] = deque(maxlen=_STEPS_AVERAGED)
        self._steps = 0

    def message(self, text: str) -> None:
        """Print one line."""
        if not self._quiet:
            self._print(masked_text(text))

    def step(self, record: StepRecord, total_steps: int) -> None:
        """Print a line every `log.every` steps, and for first, last, skipped and validated ones.

        Args:
            record: The step that has ended.
            total_steps: Number of the last step of the run.
        """
        if self._quiet:
            return
        if self._steps == 1:
            # The first step compiles, allocates and connects, so its time is not representative.
            self._seconds.clear()
        self._seconds.append(record.step_seconds)
        self._steps += 1
        if self._needs_line(record, total_steps):
            mean = math.fsum(self._seconds) / len(self._seconds)
            self._print(progress_line(record, total_steps, (total_steps - record.step) * mean))

    def _needs_line(self, record: StepRecord, total_steps: int) -> bool:
        return (
            self._steps == 1
            or record.step % self._every == 0
            or record.step >= total_steps
            or record.skipped
            or record.validation_loss is not None
        )

    def _print(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            # One write per line, so that lines of several processes do not mix in a shared log.
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
            self._stream.flush()
        except OSError as error:
            discard(self._stream)
            logger.warning(
                "the output of this run cannot be written any more (%s); training continues, see "
                "its step records",
                error.strerror,
            )
