"""Writes the checkpoints of a run, by default while training continues.

A save copies the state to host memory (see `snapshot`). A separate thread writes the copy with
`saving.save`, whose collectives use a separate group. That thread waits for the disk, or copies and
sums bytes in native code, so it rarely holds the interpreter lock.

A failed save is reported immediately, and training continues. Earlier checkpoints are unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.checkpoint import saving, storage
from distmp.checkpoint.manifest import HEALTHY, Health
from distmp.checkpoint.settings import CheckpointConfig, Retention
from distmp.checkpoint.snapshot import HostBuffers, Snapshot, written_here
from distmp.distributed.comparison import check_same, describe_tensor
from distmp.distributed.failing_together import Ranks, describe
from distmp.distributed.world import World
from distmp.errors import CheckpointError, DistmpError
from distmp.utils.flat_shard import FlatShard
from distmp.utils.processes import lower_priority

# How long a rank that fails alone waits for a pending save.
PATIENCE_SECONDS = 10.0


@dataclass
class _Pending:
    """A save that a thread is writing.

    Attributes:
        step: Step of the checkpoint.
        snapshot: The copy of the state that is written.
        thread: The thread that writes it.
        problem: Why the save failed, valid once the thread has ended; None if it succeeded. Only
            the text: an exception would keep its frames alive, and with them the process group.
        seconds: Duration of the save in seconds.
    """

    step: int
    snapshot: Snapshot
    thread: threading.Thread = field(init=False)
    problem: str | None = "the writing thread ended without a result"
    seconds: float = 0.0


@dataclass(eq=False)
class CheckpointWriter:
    """Saves the state of a run when it is due, one save at a time.

    Every rank creates one and calls `is_due`, `save` and `finish` in the same steps,
    inside a `with` block. After the block no save is pending, so process groups can be destroyed.

    Args:
        settings: When and how to save.
        directory: Directory of the run's checkpoints.
        world: The ranks.
        timeout_seconds: Timeout of a collective of a save, in seconds.
        log: Prints a message on rank 0.
        on_saved: Called with the step and the seconds of each successful save.
        permit: Raises a `DistmpError` if this job must not write any more; called on rank 0.
        overwrite: Whether `save` with `wait` writes a step again that is saved already.

    Attributes:
        saved_step: Step of the latest complete checkpoint of this run; None if there is none.
        best_step: Step of the best checkpoint so far, see `Retention`; None for none.
    """

    settings: CheckpointConfig
    directory: Path
    world: World
    _: KW_ONLY
    timeout_seconds: float
    log: Callable[[str], None]
    on_saved: Callable[[int, float], object] = lambda step, seconds: None
    permit: Callable[[], None] = lambda: None
    overwrite: bool = False

    def __post_init__(self) -> None:
        self._retention = Retention(self.settings.keep, self.settings.keep_every)
        self.saved_step: int | None = None
        self.best_step: int | None = None
        self._failure: str | None = None
        self._pending: _Pending | None = None
        self._buffers = HostBuffers()
        self._group: dist.ProcessGroup | None = None

    def redirect(self, directory: Path, retention: Retention) -> None:
        """Save to another directory from now on; waits for a save that is still pending.

        Args:
            directory: Directory of the checkpoints.
            retention: The rules that select the checkpoints to keep.
        """
        self.finish()
        self.directory, self._retention = directory, retention

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the updates of `optimizer` wait for a pending copy of the state."""
        optimizer.register_step_pre_hook(lambda *_: self.release())

    def resumed(self, step: int, *, saved: bool) -> None:
        """Record that the state of `step` was loaded.

        Args:
            step: Number of steps done.
            saved: Whether the checkpoint is in the directory of this run.
        """
        self.saved_step = step if saved else None
        self._retention = replace(self._retention, continued_from=step)

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step`, the same on all ranks.

        Also reports a save that has failed in the meantime.
        """
        self.report()
        every = self.settings.every
        return every > 0 and step % every == 0

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        numbers: dict[str, Any],
        held: Collection[str] = (),
        health: Health = HEALTHY,
        *,
        wait: bool = False,
    ) -> None:
        """Save the state of `step`; the state may change as soon as this returns. Collective.

        Waits for a save that is still pending. Does not raise if writing fails.

        Args:
            step: Number of steps done.
            tensors: All tensors of the state by name, see `saving.save`.
            numbers: Values that JSON can represent.
            held: Names of the tensors that only a guarded optimizer changes: parameters and their
                optimizer state. In a healthy state they are finite. A buffer may hold an infinite
                value on purpose, such as a mask.
            health: Whether a run should continue from the state; see `saving.save`.
            wait: Return when the state is written. Without `overwrite`, do nothing if `step` is
                saved already.

        Raises:
            RuntimeError: If ranks save asynchronously outside of the `with` block.
        """
        write = functools.partial(
            saving.save,
            self.directory,
            step,
            numbers=copy.deepcopy(numbers),  # a loop may append to a list while a thread writes
            keep=replace(self._retention, best=self.best_step),
            permit=self.permit,
            finite=held,
            health=health,
        )
        if wait or not self.settings.asynchronous:
            self._save_now(step, tensors, write)
            return
        if self.world.group is not None and self._group is None:
            raise RuntimeError("a checkpoint writer saves only inside its `with` block")
        self.finish()
        # From these, each rank determines what it writes.
        shared = {n: t for n, t in sorted(tensors.items()) if not isinstance(t, FlatShard)}
        described = {name: describe_tensor(tensor) for name, tensor in shared.items()}
        written = written_here(tensors, self.world.rank, self.world.world_size)
        pending = _Pending(step, Snapshot(written, held, self._buffers))
        pending.thread = threading.Thread(
            target=self._write,
            args=(pending, write, self._group, described),
            name=f"checkpoint of step {step}",
            daemon=True,  # a save that hangs must not keep a failed rank alive
        )
        self._pending = pending
        pending.thread.start()

    def _save_now(self, step: int, tensors: dict[str, Tensor], write: Callable[..., Path]) -> None:
        self.finish()
        if self.saved_step == step and not self.overwrite:
            return
        started = time.perf_counter()
        problem = None
        try:
            write(tensors)
        except CheckpointError as error:
            problem = str(error)
        self._record(step, problem, time.perf_counter() - started)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written on this rank."""
        return self._pending is not None and self._pending.thread.is_alive()

    def release(self) -> None:
        """Wait until the tensors that the pending save copies may change; it continues to write."""
        if self._pending is not None:
            self._pending.snapshot.release()

    def finish(self) -> None:
        """Wait for a pending save and report it if it failed.

        Call it before anything other than a guarded optimizer changes the state.
        """
        self._join(timeout=None)

    def report(self) -> None:
        """Record a save that has ended."""
        if self._pending is not None and not self.is_writing:
            self.finish()

    def check(self) -> None:
        """Raise once if the last save failed.

        Call it after `finish`.

        Raises:
            CheckpointError: The same on all ranks.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"{failure}; {self._last_saved()}")

    def __enter__(self) -> CheckpointWriter:
        if self.settings.asynchronous and self.world.group is not None:
            timeout = timedelta(seconds=self.timeout_seconds)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        together = error is None or isinstance(error, DistmpError)
        patience = PATIENCE_SECONDS if isinstance(error, Exception) else 0.0
        self._join(None if together else patience)
        self._buffers.clear()
        self._group = None

    def _write(
        self,
        pending: _Pending,
        write: Callable[..., Path],
        group: dist.ProcessGroup | None,
        described: dict[str, str],
    ) -> None:
        """Write a snapshot, in the writing thread."""
        goal = f"save {storage.final_path(self.directory, pending.step)}"
        started = time.perf_counter()
        try:
            lower_priority()
            if self.world.device.type == "cuda":  # a new thread uses the first device
                torch.cuda.set_device(self.world.device)
            tensors = storage.all_or_checkpoint_error(Ranks(group), goal, pending.snapshot.complete)
            check_same(group, torch.device("cpu"), described)
            write(tensors, group=group)
            pending.problem = None
        except CheckpointError as error:
            pending.problem = str(error)
        except Exception as error:  # noqa: BLE001  # a lost rank, or a bug in distmp
            pending.problem = f"cannot {goal}: {describe(error)}"
        finally:
            pending.snapshot.cancel()  # release a training thread that waits for the copies
            pending.seconds = time.perf_counter() - started

    def _join(self, timeout: float | None) -> None:
        pending = self._pending
        if pending is None:
            return
        pending.snapshot.release(timeout)
        pending.thread.join(timeout)
        self._pending = None
        if pending.thread.is_alive():
            self.log(f"the checkpoint of step {pending.step} was not finished")
            return
        self._record(pending.step, pending.problem, pending.seconds)

    def _record(self, step: int, problem: str | None, seconds: float) -> None:
        """Record the result of a save, and report it if it failed."""
        self._failure = problem
        if problem is None:
            self.saved_step = step
            self.on_saved(step, seconds)
            return
        if self.world.rank == 0:
            self._discard(step)
        # Also logged when the process ends, after the last step.
        self.log(f"NOT SAVED: {problem}; {self._last_saved()}")

    def _discard(self, step: int) -> None:
        """Remove the files of a failed save: other files of the run may need their space."""
        with contextlib.suppress(DistmpError):
            self.permit()
            saving.discard(self.directory, step)

    def _last_saved(self) -> str:
        if self.saved_step is None:
            return "no checkpoint has been saved yet"
        return f"the last checkpoint is of step {self.saved_step}"
