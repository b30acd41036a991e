from __future__ import annotations

import dataclasses
from pathlib import Path

from distmp.telemetry.console import Console
from distmp.telemetry.records import StepRecord, read_records
from distmp.telemetry.settings import LogConfig
from distmp.telemetry.trackers import Trackers
from distmp.training.callbacks.step_logger import StepLog

RECORD = StepRecord(1, 8, 2.0, 64.0, 1.0, 1e-3, 1.0, False, 0, 1, 100.0, 0.1, 1 << 20)


def make_log(path: Path | None, after_step: int = 0) -> StepLog:
    console = Console(LogConfig(), quiet=True)
    return StepLog(path, after_step, Trackers({}, console.message), console, steps=9)


def written(path: Path) -> list[tuple[int, float | None]]:
    return [(record.step, record.validation_loss) for record in read_records(path)]


def fill(log: StepLog, *steps: int) -> None:
    for step in steps:
        log.write(dataclasses.replace(RECORD, step=step))


def test_a_run_that_continues_drops_later_records(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = make_log(path)
    fill(log, 1, 2, 3)
    log.close()
    log = make_log(path, after_step=2)
    fill(log, 3, 4, 5)
    log.rewind(3)
    fill(log, 4)
    log.close()
    assert [step for step, _ in written(path)] == [1, 2, 3, 4]


def test_a_validation_that_comes_later_belongs_to_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = make_log(path)
    fill(log, 1, 2)
    log.add_validation(2, 1.5, {})
    assert written(path) == [(1, None), (2, 1.5)]
    # A run whose last record is missing keeps its records.
    log.add_validation(3, 1.25, {})
    log.close()
    assert written(path) == [(1, None), (2, 1.5)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    log = make_log(None)
    fill(log, 1)
    log.add_validation(1, 1.0, {})
    log.rewind(0)
    log.close()
    assert [*tmp_path.iterdir()] == []
