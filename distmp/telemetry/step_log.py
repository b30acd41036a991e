"""Where the numbers of the steps go: the record file, loggers and the console."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from distmp.telemetry.console import Console
from distmp.telemetry.records import RecordWriter, StepRecord, read_records
from distmp.telemetry.trackers import Trackers


class StepLog:
    """Takes the record of every step; what follows from it appears on the first rank only.

    Args:
        path: Of the record file; None on all ranks but the first, which write nothing.
        after_step: The step that the run continues from, or 0; records of later steps are dropped.
        trackers: Loggers, already started.
        console: Where steps and complaints are shown.
        steps: How many steps the run has.
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
        """Keep and show what is known about a step."""
        if self._writer is not None:
            self._writer.write(record)
        self._trackers.write(record)
        self._console.step(record, self._steps)

    def rewind(self, last_step: int) -> None:
        """Drop the records of later steps."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._opened(last_step)

    def add_validation(self, step: int, loss: float) -> None:
        """Put a validation loss into the record of the last step, if it is `step`."""
        if self._path is None:
            return
        records = read_records(self._path)
        self.rewind(step - 1)
        if self._writer is not None and records and records[-1].step == step:
            self._writer.write(dataclasses.replace(records[-1], validation_loss=loss))

    def close(self) -> None:
        """Close the record file, and let the loggers write what they hold back."""
        if self._writer is not None:
            self._writer.close()
        self._trackers.close()

    def _opened(self, after_step: int) -> RecordWriter | None:
        if self._path is None:
            return None
        return RecordWriter(self._path, after_step, self._console.message)
