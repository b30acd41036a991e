"""Format the progress line: the same fields on a terminal and in a log file."""

from __future__ import annotations

from collections.abc import Iterator

from distmp.telemetry.records import StepRecord
from distmp.utils.units import bytes_text, duration, per_second, quantity, scale_text

_SEPARATOR = "  "


def progress_line(record: StepRecord, total_steps: int, seconds_left: float) -> str:
    """Format one step as a line of aligned columns, the most important ones first.

    Args:
        record: The step.
        total_steps: Number of steps of the run.
        seconds_left: Estimated time until the last step; not finite if unknown.
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
    return _SEPARATOR.join(fields)


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
