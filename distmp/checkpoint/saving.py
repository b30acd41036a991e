"""Saves checkpoints, of tensors, sharded or not, and a few numbers, and removes old ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from distmp.checkpoint import dcp, manifest, storage
from distmp.checkpoint.settings import Retention
from distmp.distributed.failing_together import Ranks
from distmp.errors import CheckpointError, listed
from distmp.utils.files import PRIVATE

logger = logging.getLogger("distmp")


def save(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    keep: int | Retention,
    *,
    group: dist.ProcessGroup | None = None,
    permit: Callable[[], None] = lambda: None,
    finite: Collection[str] = (),
    health: manifest.Health = manifest.HEALTHY,
) -> Path:
    """Write the checkpoint of `step` and make it the latest. Collective over all ranks.

    The checkpoint is atomic: it appears completely, under its final name, or not at all. A
    checkpoint of the same step is replaced. Those from before the run returned to an earlier step
    are set aside; see `tidy`.

    An unhealthy state is written, too, for examination, and marked in `state.json`. It never
    displaces a healthy one, and `recovery` skips it. A state that was saved after a skipped step
    does not displace other ones, either, until an update follows: if the next steps are skipped,
    too, its weights are unhealthy.

    May run in another thread, if nothing else uses `group` meanwhile.

    Args:
        directory: Directory of the run's checkpoints, on storage that all ranks share.
        step: Number of steps done.
        tensors: Tensors of any shape, dtype and device, by name: DTensors and flat shards, of
            which every rank writes its part, and plain tensors, which are equal on all ranks. A
            rank may omit tensors that other ranks write.
        numbers: Values that JSON can represent. Those of rank 0 are written.
        keep: Number of latest checkpoints to keep, 1 or more, or all rules of retention.
        group: Group of all ranks, used for the collectives. None: the default group.
        permit: Raises if this job must not write any more. Called on rank 0, before anything is
            written and before the checkpoint appears.
        finite: Names of tensors that hold only finite values in a healthy state.
        health: Whether a run should continue from the state. The value of rank 0 counts.

    Returns:
        Path of the checkpoint.

    Raises:
        CheckpointError: The same on all ranks, if any of them failed. Earlier checkpoints are
            unchanged.

    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> from distmp.checkpoint import saving
        >>> path = saving.save(Path("saved"), 7, {"average": torch.ones(3)}, {"epoch": 1}, keep=2)
        >>> path.name
        'step-000007'
    """
    retention = Retention(keep) if isinstance(keep, int) else keep
    ranks = Ranks(group)
    goal = f"save {storage.final_path(directory, step)}"

    def begin() -> str:
        permit()
        manifest.encode(step, numbers, {})  # raises before anything is written
        return storage.prepare(directory, step).name

    writing = directory / storage.rank_0_or_checkpoint_error(ranks, goal, begin)
    written = ranks.gather(dcp.write(goal, writing, tensors, ranks, finite))
    files = {name: file for sums, _ in written for name, file in sums.items()}
    # The last one, after one data file of each rank.
    files[storage.INDEX_FILE] = files.pop(storage.INDEX_FILE)

    non_finite = sorted({name for _, names in written for name in names})
    if non_finite:
        health = health._replace(problem=f"NaN or infinite values in {listed(non_finite)}")

    def finish() -> str:
        permit()
        state = manifest.encode(step, numbers, files, health, retention.best)
        final = _finish(writing, state, files)
        tidy(directory, step, retention)
        if health.problem is not None:
            logger.warning(
                "%s is marked as unhealthy: %s; it does not count for checkpoint.keep, and "
                "--resume auto and rollbacks skip it",
                final,
                health.problem,
            )
        return final.name

    return directory / storage.rank_0_or_checkpoint_error(ranks, goal, finish)


def _finish(writing: Path, state: bytes, files: dict[str, manifest.FileSum]) -> Path:
    for name, written in files.items():
        try:
            manifest.check_size(writing / name, written)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} (all hosts must write to the same, shared storage)"
            ) from error
    file = writing / manifest.STATE_FILE
    # It contains the configuration of the run.
    with open(file, "wb", opener=partial(os.open, mode=PRIVATE)) as stream:
        stream.write(state)
    storage.synchronize(file)
    return storage.publish(writing)


def discard(directory: Path, step: int) -> None:
    """Remove the files of a failed save of `step`; log it if that fails."""
    try:
        for entry in storage.entries_of(directory):
            if entry.step == step and not entry.finished:
                storage.remove(entry.path)
    except OSError as error:
        logger.warning(
            "cannot remove the unfinished checkpoint of step %d in %s: %s", step, directory, error
        )


def tidy(directory: Path, step: int, retention: Retention) -> None:
    """Apply the retention rules to the checkpoints up to `step`, and set later ones aside.

    Those of a run that continued from an earlier step include a replaced one of the same step.
    Keeps the latest of those set aside, as many as `retention.last`, and permanent ones. A
    checkpoint whose state cannot be read does not count, and is not removed.

    A failure is logged and not raised: the new checkpoint is complete anyway.
    """
    try:
        # First, and the latest one last: it stays the newest if this process is killed.
        for entry in reversed(storage.entries_of(directory)):
            replaced = storage.is_superseded(entry.path)
            earlier = entry.step > step or (replaced and step > retention.continued_from)
            if entry.finished and earlier:
                logger.warning(
                    "the run continued from an earlier step and saved step %d: the earlier "
                    "checkpoint of step %d is set aside as %s",
                    step,
                    entry.step,
                    storage.set_aside(entry.path),
                )
            elif replaced:
                storage.remove(entry.path)
        by_step = {e.step: e.path for e in reversed(storage.entries_of(directory)) if e.finished}
        states = {s: state for s, p in by_step.items() if (state := manifest.readable_state(p))}
        best = {s: state.best for s, state in states.items() if state.best is not None}
        for old in retention.surplus(states, _possibly_unhealthy(states), best):
            storage.remove(by_step[old])
        aside = storage.abandoned(directory)
        permanent = retention.permanent([*states, *(entry.step for entry in aside)])
        for entry in aside[retention.last :]:
            if entry.step not in permanent:
                storage.remove(entry.path)
    except OSError as error:
        logger.warning("cannot remove old checkpoints in %s: %s", directory, error)


def _possibly_unhealthy(states: Mapping[int, manifest.State]) -> set[int]:
    """Return the steps of the unhealthy checkpoints and of those that may turn out to be.

    The latter were saved after a skipped step, and no later one shows an update of their weights:
    if the following steps are skipped, too, their weights are unhealthy.
    """
    unhealthy = set()
    updated_at = 0
    for step in sorted(states, reverse=True):
        state = states[step]
        unproven = state.health.skipped_in_a_row > 0 and updated_at <= step
        if state.health.problem is not None or unproven:
            unhealthy.add(step)
        updated_at = max(updated_at, state.updated_at)
    return unhealthy
