"""Writes the checkpoints of a run, while training goes on unless told otherwise.

A save copies the state to host memory (see `snapshot`), and a thread of its own writes the copy
through `store.save`, with collectives of a group of its own. Writing waits for the disk and copies
and sums bytes in native code, so that the interpreter is free for training nearly all of that time.

What cannot be written ends no training: it is said at once and the run goes on, or it stops where
`checkpoint.on_failure` says so. What was there before stays as it is.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.checkpoint import store
from distmp.checkpoint.clock import SaveClock
from distmp.checkpoint.layout import discard, final_path
from distmp.checkpoint.settings import CheckpointConfig
from distmp.checkpoint.snapshot import HostBuffers, Snapshot, written_here
from distmp.distributed.world import World
from distmp.errors import CheckpointError, DistmpError

# What the priority of the thread that writes is lowered by; the system limits the sum.
NICENESS = 10
# How long a rank that fails by itself waits for the save that is being written.
PATIENCE_SECONDS = 10.0


@dataclass
class _Pending:
    """A save that a thread is writing.

    Attributes:
        step: Of the checkpoint.
        snapshot: What is written.
        thread: Writes it.
        problem: Why it failed, once the thread has ended; None if it has not. Only the words: an
            error would keep its frames alive, and with them the process group.
        seconds: How long it took.
    """

    step: int
    snapshot: Snapshot
    thread: threading.Thread = field(init=False)
    problem: str | None = "the thread that writes has ended without a word"
    seconds: float = 0.0


class CheckpointWriter:
    """Saves the state of a run when it is time, one save after the other.

    Every rank makes one and calls `is_due`, `save`, `save_now` and `finish` in the same steps, in a
    `with` block: no save is under way after it, so that process groups can be left.

    Args:
        settings: When, how, and what happens if it fails.
        directory: Holds the run's checkpoints.
        world: The ranks.
        timeout_seconds: A collective that takes longer fails the save.
        say: Prints a message on the first rank.
        took: Called with the seconds that a save took until it was whole.

    Attributes:
        saved_step: Step of the latest checkpoint known to be whole; None without one.
        stalled_seconds: How long training has waited for saves so far.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        directory: store.Location,
        world: World,
        *,
        timeout_seconds: float,
        say: Callable[[str], None],
        took: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._world = world
        self._say = say
        self._took = took
        self.saved_step: int | None = None
        self.stalled_seconds = 0.0
        self._failure: str | None = None
        self._stopped = False
        self._pending: _Pending | None = None
        self._buffers = HostBuffers()
        self._clock = SaveClock(settings.every_minutes, world)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._group: dist.ProcessGroup | None = None

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer wait, in its next update, for a copy that has not ended."""
        optimizer.register_step_pre_hook(lambda *_: self._release())

    def resumed(self, step: int, *, saved: bool) -> None:
        """Take note that the state of `step` has been loaded.

        Args:
            step: Steps done.
            saved: Whether from a checkpoint in the directory of this run.
        """
        self.saved_step = step if saved else None
        self._clock.restart(step)

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`; the same on all ranks, which all have to call it.

        It is also where a save that has failed in the meantime is reported.
        """
        self._report()
        every = self._settings.every
        by_time = self._clock.is_due(step, busy=self._pending is not None)
        return by_time or (every > 0 and step % every == 0)

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        numbers: dict[str, Any],
        held: Collection[str] = (),
    ) -> None:
        """Save the state of `step`; it may change as soon as this returns. Collective.

        An earlier save that is still being written is waited for.

        Args:
            step: Steps done.
            tensors: All tensors of the state, see `store.save`.
            numbers: What JSON can hold.
            held: Names of the tensors that nothing but a guarded optimizer changes.
        """
        if not self._settings.asynchronous:
            self.save_now(step, tensors, numbers)
            return
        if self._world.group is not None and self._group is None:
            raise RuntimeError("a checkpoint writer saves in its own `with` block only")
        self.finish()
        if self._stopped:  # `save_now` comes next
            return
        started = time.perf_counter()
        self._clock.restart(step)
        here = written_here(tensors, self._world.rank, self._world.world_size)
        pending = _Pending(step, Snapshot(here, held, self._buffers))
        pending.thread = threading.Thread(
            target=self._write,
            args=(pending, numbers, self._group),
            name=f"checkpoint of step {step}",
            daemon=True,  # one that hangs keeps no failed rank alive
        )
        self._pending = pending
        pending.thread.start()
        self.stalled_seconds += time.perf_counter() - started

    def save_now(self, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Save the state of `step` and wait until it is written, unless it is already. Collective.

        Like `save`, it does not raise if that fails.
        """
        self.finish()
        if self.saved_step == step:
            return
        started = time.perf_counter()
        self._clock.restart(step)
        problem = None
        try:
            store.save(self._directory, step, tensors, numbers, keep=self._settings.retention)
        except CheckpointError as error:
            problem = str(error)
        self._note(step, problem, time.perf_counter() - started)
        self.stalled_seconds += time.perf_counter() - started

    @property
    def wants_stop(self) -> bool:
        """Whether the run should end after this step, since a save has failed."""
        return self._stopped

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written on this rank."""
        return self._pending is not None and self._pending.thread.is_alive()

    def finish(self) -> None:
        """Wait for the save that is being written, if any, and report it if it failed.

        To be called before anything but a guarded optimizer changes the state.
        """
        started = time.perf_counter()
        self._join(timeout=None)
        self.stalled_seconds += time.perf_counter() - started

    def check(self) -> None:
        """Raise if the last save failed, or one has stopped the run; `finish` comes first.

        Raises:
            CheckpointError: On all ranks alike.
        """
        if self._failure is not None:
            raise CheckpointError(f"{self._failure}; {self._what_there_is()}")
        if self._stopped:
            raise CheckpointError(
                "the run has stopped because a checkpoint could not be written "
                f"(checkpoint.on_failure = stop); {self._what_there_is()}"
            )

    def __enter__(self) -> CheckpointWriter:
        if self._settings.asynchronous and self._world.group is not None:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        together = error is None or isinstance(error, DistmpError)
        interrupted = not (together or isinstance(error, Exception))
        self._join(timeout=None if together else 0.0 if interrupted else PATIENCE_SECONDS)
        self._group = None

    def _write(
        self, pending: _Pending, numbers: dict[str, Any], group: dist.ProcessGroup | None
    ) -> None:
        """Write a snapshot; what a thread of its own does."""
        path = final_path(self._directory, pending.step)
        started = time.perf_counter()
        try:
            _give_way()
            if self._world.device.type == "cuda":  # a thread begins with the first device
                torch.cuda.set_device(self._world.device)
            goal = f"save {path}"
            tensors = store.Ranks(group).on_every_rank(goal, pending.snapshot.complete)
            store.save(
                self._directory,
                pending.step,
                tensors,
                numbers,
                keep=self._settings.retention,
                group=group,
            )
            pending.problem = None
        except CheckpointError as error:
            pending.problem = str(error)
        except Exception as error:  # noqa: BLE001  # another rank is lost, or a fault of ours
            pending.problem = f"cannot save {path}: {type(error).__name__}: {error}"
        finally:
            pending.seconds = time.perf_counter() - started

    def _release(self) -> None:
        """Let the optimizer change what the pending snapshot holds, as soon as it is copied."""
        if self._pending is not None:
            started = time.perf_counter()
            self._pending.snapshot.release()
            self.stalled_seconds += time.perf_counter() - started

    def _report(self) -> None:
        """Take note of a save that has ended."""
        if not self.is_writing:
            self._join(timeout=None)

    def _join(self, timeout: float | None) -> None:
        pending = self._pending
        if pending is None:
            return
        pending.snapshot.release()
        pending.thread.join(timeout)
        self._pending = None
        if pending.thread.is_alive():
            self._say(f"the checkpoint of step {pending.step} has not been finished")
            return
        self._note(pending.step, pending.problem, pending.seconds)

    def _note(self, step: int, problem: str | None, seconds: float) -> None:
        """Take note of how a save has ended, and say so if it failed."""
        self._failure = problem
        if problem is None:
            self.saved_step = step
            self._took(seconds)
            return
        if self._world.rank == 0:
            # What is there of it only takes room, which other files of the run may need.
            discard(self._directory, step)
        self._stopped = self._stopped or self._settings.on_failure == "stop"
        then = "stops (checkpoint.on_failure)" if self._stopped else "goes on"
        self._say(f"NOT SAVED: {problem}; {self._what_there_is()}; the run {then}")

    def _what_there_is(self) -> str:
        if self.saved_step is None:
            return "nothing has been saved yet"
        return f"the last checkpoint is of step {self.saved_step}"


def _give_way() -> None:
    """Let training go first where all cores are busy, as with ranks on CPUs."""
    if sys.platform == "linux":  # elsewhere priorities belong to processes
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, nice + NICENESS)
