"""Records each step and reports it: record file, trackers, console."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from distmp.engine.outcome import StepNumbers, advice
from distmp.telemetry import trackers
from distmp.telemetry.measurements import peak_memory_bytes, summarize
from distmp.telemetry.records import RecordWriter, StepRecord
from distmp.telemetry.trackers import Trackers
from distmp.training.callbacks.callback import Callback, Rollback, StepResult, TrainingLoop
from distmp.training.callbacks.validation import weight_unit
from distmp.training.run import Run
from distmp.training.run_fingerprint import to_json

# Fields of a record that are those of `StepNumbers`; the overflow of a record has its cause.
_OF_NUMBERS = {each.name for each in fields(StepRecord)} & {*StepNumbers._fields} - {"overflow"}


class StepLogger(Callback):
    """Writes the record of every step to the record file, the trackers and the console.

    Only the first rank writes anything.

    Args:
        run: The run, in its state before the first step.
    """

    def __init__(self, run: Run) -> None:
        self._trackers = run.world.ranks.all_or_none(lambda: _start_trackers(run))
        self._writer: RecordWriter | None = None
        if run.world.rank == 0:
            path, warn = run.directory.records, run.console.message
            self._writer = RecordWriter(path, run.progress.step, warn)
        self._rollback: Rollback | None = None
        self._started = 0
        self._first_loss = math.nan  # of step 1; a run that resumes has none
        self._last_losses: deque[float] = deque(maxlen=8)
        # Advice on skipped steps that was printed.
        self._advised: set[str] = set()

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        """Write the record of a step to all destinations, and print its messages."""
        record = self._record(result, trainer)
        if self._writer is not None:
            self._writer.write(record)
        self._trackers.write(record)
        trainer.console.step(record, trainer.config.steps)
        for message in self._messages(result):
            trainer.console.message(message)
        self._last_losses.append(record.loss)
        if result.step == 1:
            self._first_loss = record.loss

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        """Warn if all of the last losses are more than twice the first one."""
        first, last = self._first_loss, self._last_losses
        if 0 < 2 * first < min(last):
            trainer.console.message(
                f"warning: the loss rose from {first:.4g} in step 1 to {last[-1]:.4g} in step "
                f"{trainer.progress.step}; lower optim.lr = {trainer.config.optim.lr:g}"
            )

    def on_validation(
        self, trainer: TrainingLoop, loss: float, metrics: Mapping[str, float]
    ) -> None:
        """Add the numbers to the record of a step that was written before its validation."""
        if trainer.pending is None:
            self._trackers.add_validation(trainer.progress.step, loss, metrics)
            if self._writer is not None:
                self._writer.add_validation(trainer.progress.step, loss, metrics)

    def on_save(self, trainer: TrainingLoop, step: int, seconds: float) -> None:
        """Delete records of steps whose checkpoints the save has set aside."""
        if self._writer is not None:
            self._writer.saved()

    def on_rollback(self, trainer: TrainingLoop, rollback: Rollback) -> None:
        """Drop the records of later steps; the next record notes the rollback."""
        if self._writer is not None:
            self._writer.rewind(rollback.to_step)
        self._rollback = rollback

    def on_exit(self, trainer: TrainingLoop, error: BaseException | None) -> None:
        """Close the record file and the trackers."""
        if self._writer is not None:
            self._writer.close()
        self._trackers.close()

    def _messages(self, result: StepResult) -> Iterator[str]:
        numbers, spike, overflow = result.numbers, result.spike, result.overflow
        if overflow is not None:
            yield f"step {result.step} skipped: {overflow.diagnosis}{self._once(overflow.advice)}"
        elif numbers.weight == 0:
            problem, _, hint = advice(numbers).partition("; ")
            yield f"step {result.step} skipped: {problem}{self._once(hint)}"
        if numbers.dropped:
            yield (
                f"step {result.step}: dropped {numbers.dropped} microbatches with non-finite "
                "gradients"
            )
        if spike is not None and overflow is None and not result.rolls_back:
            yield f"step {result.step}{' skipped' if numbers.skipped else ''}: {spike.problem}"

    def _once(self, hint: str) -> str:
        """Return advice for the end of a message; "" if an earlier message has it."""
        known = hint in self._advised
        self._advised.add(hint)
        return "" if known else f"; {hint}"

    def _operands(self, result: StepResult, trainer: TrainingLoop) -> dict[str, Any] | None:
        """Return the statistics of low-precision operands, in steps whose number prints a line."""
        statistics, self._started = result.outcome.matmul_statistics, self._started or result.step
        if statistics is None or trainer.world.rank != 0:
            return None
        config = trainer.config
        ends = result.step in (self._started, config.steps)
        printed = ends or result.numbers.skipped or result.step % config.log.every == 0
        return summarize(statistics) if printed else None

    def _divergence(self, result: StepResult) -> dict[str, Any] | None:
        """Return the spike of a step, and the rollback before it, if any."""
        entry = {} if result.spike is None else result.spike._asdict()
        if self._rollback is not None:
            entry["rolled_back"], self._rollback = self._rollback._asdict(), None
        return entry or None

    def _record(self, result: StepResult, trainer: TrainingLoop) -> StepRecord:
        numbers = result.numbers
        return StepRecord(
            step=result.step,
            samples=result.samples,
            **{name: getattr(numbers, name) for name in _OF_NUMBERS},
            weight_per_second=numbers.weight / result.seconds,
            step_seconds=result.seconds,
            memory_bytes=peak_memory_bytes(trainer.world.device),
            validation_loss=result.validation_loss,
            validation_metrics=dict(result.validation_metrics) or None,
            overflow=None if result.overflow is None else result.overflow.to_record(),
            divergence=self._divergence(result),
            unit=weight_unit(trainer.config, numbers.weight),
            rank_seconds=result.rank_seconds,
            formats=result.outcome.formats,
            low_precision_operands=self._operands(result, trainer),
        )


def _start_trackers(run: Run) -> Trackers:
    return trackers.start(
        run.config.log.tracker_options if run.world.rank == 0 else {},
        directory=run.directory.path,
        hyperparameters=to_json(run.config),
        after_step=run.progress.step,
        warn=run.console.message,
    )
