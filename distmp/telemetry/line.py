"""Format the progress line: the same fields on a terminal and in a log file."""

from __future__ import annotations

from typing import NamedTuple

from distmp.telemetry.records import StepRecord
from distmp.utils.units import bytes_text, duration, per_second, quantity, scale_text

_SEPARATOR = "  "


class Field(NamedTuple):
    """One column of the line; if it is too long, columns with the highest `rank` are dropped."""

    text: str
    rank: int


def progress_line(
    record: StepRecord, total_steps: int, seconds_left: float, width: int | None = None
) -> str:
    """Format one step as a line of aligned columns.

    Args:
        record: The step.
        total_steps: Number of steps of the run.
        seconds_left: Estimated time until the last step; not finite if unknown.
        width: Number of available columns: the least important fields are dropped and the rest is
            cut to fit. None shows everything.
    """
    fields = step_fields(record, total_steps, seconds_left)
    while width is not None and len(fields) > 1 and len(_joined(fields)) > width:
        fields.remove(max(fields, key=lambda field: field.rank))
    return _joined(fields)[:width]


def step_fields(record: StepRecord, total_steps: int, seconds_left: float) -> list[Field]:
    """Format each field to a width that does not change from step to step."""
    digits = len(str(total_steps))
    fields = [
        Field(f"step {record.step:>{digits}}/{total_steps}", 0),
        Field(f"loss {_loss(record.loss):>8}", 1),
        Field(f"{quantity(record.weight_per_second):>5} {per_second(record.unit)}", 3),
        Field(f"lr {record.learning_rate:.2e}", 7),
        Field(f"norm {_norm(record.grad_norm):>8}", 4),
        Field(f"scale {scale_text(record.loss_scale):>5}", 6),
        Field(f"skipped {record.skipped_total:>3}", 5),
        Field(f"{bytes_text(record.memory_bytes):>8}", 8),
        Field(f"{duration(seconds_left):>8} left", 2),
    ]
    return fields + _notes(record)


def _notes(record: StepRecord) -> list[Field]:
    """Return fields of only some steps, which come last so that the columns stay in place."""
    notes = []
    if record.validation_loss is not None:
        notes.append(Field(f"validation loss {_loss(record.validation_loss)}", 9))
    for name, value in (record.validation_metrics or {}).items():
        notes.append(Field(f"{name} {_loss(value)}", 9))
    if record.skipped:
        notes.append(Field("this step skipped", 10))
    return notes


def _loss(loss: float) -> str:
    return f"{loss:.2e}" if 1000 <= abs(loss) < float("inf") else f"{loss:.4f}"


def _norm(norm: float) -> str:
    return f"{norm:.3f}" if norm == 0 or 0.001 <= norm < 1000 else f"{norm:.2e}"


def _joined(fields: list[Field]) -> str:
    return _SEPARATOR.join(field.text for field in fields)
