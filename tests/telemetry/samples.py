from __future__ import annotations

from dataclasses import replace
from typing import Any

from distmp.telemetry.records import StepRecord

_TYPICAL = StepRecord(
    step=1,
    samples=64,
    loss=2.3456,
    weight=65536.0,
    grad_norm=0.987,
    learning_rate=3e-4,
    loss_scale=65536.0,
    skipped=False,
    skipped_total=0,
    applied_total=1,
    weight_per_second=12345.0,
    step_seconds=0.5,
    memory_bytes=1288490189,
)


def record(step: int = 1, **changes: Any) -> StepRecord:
    """Return a plausible record of a step, with some fields changed."""
    return replace(_TYPICAL, step=step, samples=64 * step, **changes)
