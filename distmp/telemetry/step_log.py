"""Send step records to the record file, the trackers and the console."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from distmp.telemetry.console import Console
from distmp.telemetry.records import RecordWriter, StepRecord, read_records
from distmp.telemetry.trackers import Trackers


class StepLog:
    """Logs the record of every step; only the first rank writes anything.

    Args:
        path: The record file; None on all ranks except the first.
        after_step: The step from which the run continues, or 0; records of later steps are dropped.
        trackers: The started trackers.
        console: Prints steps and warnings.
        steps: Number of steps of the run.
    """

    def __init__(
        self,
        path: Path | None,
        after_step: int,
        trackers: Trackers,
        console: Console,
        steps: int,
    ) -> None:
        self._path = path
        self._trackers = trackers
        self._console = console
        self._steps = steps
        self._writer = self._opened(after_step)

    def write(self, record: StepRecord) -> None:
        """Write the record of a step to all destinations."""
        if self._writer is not None:
            self._writer.write(record)
        self._trackers.write(record)
        self._console.step(record, self._steps)

    def rewind(self, last_step: int) -> None:
        """Drop the records of later steps."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._opened(last_step)

    def add_validation(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """Add the numbers of a validation to the record of the last step, if that is `step`."""
        if self._path is None:
            return
        records = read_records(self._path)
        self.rewind(step - 1)
        if self._writer is not None and records and records[-1].step == step:
            self._writer.write(
                dataclasses.replace(
                    records[-1], validation_loss=loss, validation_metrics=dict(metrics) or None
                )
            )

    def close(self) -> None:
        """Close the record file, and flush the trackers."""
        if self._writer is not None:
            self._writer.close()
        self._trackers.close()

    def _opened(self, after_step: int) -> RecordWriter | None:
        if self._path is None:
            return None
        return RecordWriter(self._path, after_step, self._console.message)
