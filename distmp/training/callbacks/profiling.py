"""Records the configured steps with torch's profiler."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from distmp.distributed.progress import CurrentPhase, current_phase
from distmp.telemetry.profiler import RankTimes, measured, summary
from distmp.training.callbacks.callback import Callback, StepResult, TrainingLoop
from distmp.training.run import Run

logger = logging.getLogger("distmp")

# Rows of the table of operators.
_OPERATORS = 50
# An event of the CUDA allocator with its stack takes about a kilobyte.
_MAX_EVENTS = 100_000
# torch's functions for snapshots of CUDA memory are private. Tested with torch 2.11 and 2.13.
_record_memory: Any = torch.cuda.memory._record_memory_history
_dump_memory: Any = torch.cuda.memory._dump_snapshot


class Profiling(Callback):
    """Records the configured steps on every rank.

    Each rank writes a trace (`trace-rank0.json`, for Perfetto), a table of its operators
    (`operators-rank0.txt`) and on CUDA a snapshot of its memory (`memory-rank0.pickle`, for
    pytorch.org/memory_viz). Rank 0 logs the time of a step and its exposed communication. If the
    run ends with an error, there is no summary.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._window = run.config.profile.window
        self._directory = run.directory.profile
        self._world = run.world
        self._log = run.console.message
        self._on_cuda = run.world.device.type == "cuda"
        self._started = False
        self._profile: profile | None = None
        self._ranges = _Ranges()

    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        """Start before the first step to record, stop before the step after the last one."""
        with trainer.timer.paused():
            if self._profile is not None:
                if step > self._window[-1]:
                    self._finish()
            elif step in self._window and not self._started:
                self._started = True
                self._start()

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        """Stop before a rollback, which is not part of a step."""
        if result.rolls_back:
            self._finish()

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        """Stop, and report if no step was recorded."""
        self._finish()
        if self._window and not self._started:
            self._log(f"profile: nothing was recorded, step {self._window[0]} did not run")

    def on_exit(self, trainer: TrainingLoop, error: BaseException | None) -> None:
        """After an error, write what was recorded."""
        if self._profile is None:
            return
        # No collective: the other ranks may be gone or in other code.
        self._stop()
        logger.warning("profile: the recording up to the error is in %s", self._directory)

    def _finish(self) -> None:
        """Stop recording, if it has started, and log the summary; all ranks must call it."""
        if self._profile is None:
            return
        own = self._stop()
        known = [rank for rank in self._world.ranks.gather(own) if rank is not None]
        if self._world.rank == 0 and known:
            first, last = self._ranges.steps
            ranks = "1 rank" if len(known) == 1 else f"{len(known)} ranks"
            what = f"profile of steps {first} to {last} on {ranks}, in {self._directory}"
            self._log("\n  ".join([what, *summary(known)]))

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._on_cuda:
            # Exclude kernels that were launched before these steps.
            torch.cuda.synchronize(self._world.device)
            activities.append(ProfilerActivity.CUDA)
            _record_memory(enabled="all", context="all", stacks="python", max_entries=_MAX_EVENTS)
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()
        current_phase.observer = self._ranges

    def _stop(self) -> RankTimes | None:
        """Stop recording, write the files of this rank, and return its times."""
        assert self._profile is not None
        recorded, self._profile = self._profile, None
        current_phase.observer = None
        self._ranges.close()
        current_phase.enter("writing a profile", transfers=True)
        if self._on_cuda:
            # After an error the device may fail.
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self._world.device)
        recorded.stop()
        try:
            return self._write(recorded)
        except (OSError, ValueError) as error:
            logger.warning("cannot write the profile: %s; training continues without it", error)
            return None
        finally:
            if self._on_cuda:
                _record_memory(enabled=None)

    def _write(self, recorded: profile) -> RankTimes | None:
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._on_cuda:
            _dump_memory(str(self._file("memory", "pickle")))
        trace = self._file("trace", "json")
        recorded.export_chrome_trace(str(trace))
        by = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
        operators = recorded.key_averages(group_by_input_shape=True)
        self._file("operators", "txt").write_text(operators.table(sort_by=by, row_limit=_OPERATORS))
        times = measured(json.loads(trace.read_bytes())["traceEvents"], on_cuda=self._on_cuda)
        return RankTimes(self._world.rank, socket.gethostname(), *times) if times else None

    def _file(self, what: str, ending: str) -> Path:
        return self._directory / f"{what}-rank{self._world.rank}.{ending}"


class _Ranges:
    """Marks the phases of the main thread in a trace, as ranges inside of those of the steps.

    Attributes:
        steps: First and last step.
    """

    def __init__(self) -> None:
        self.steps = (0, 0)
        self._step, self._place = contextlib.ExitStack(), contextlib.ExitStack()

    def __call__(self, doing: CurrentPhase) -> None:
        self._place.close()
        if doing.step != self.steps[1]:
            self._step.close()
            self.steps = (self.steps[0] or doing.step, doing.step)
            self._step.enter_context(record_function(f"step {doing.step}"))
        self._place.enter_context(record_function(doing.place))

    def close(self) -> None:
        """End the open ranges."""
        self._place.close()
        self._step.close()
