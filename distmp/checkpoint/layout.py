"""Names the checkpoints in a directory and removes old ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from distmp.checkpoint import manifest
from distmp.checkpoint.location import Location
from distmp.checkpoint.manifest import State
from distmp.checkpoint.retention import Retention
from distmp.checkpoint.storage import Storage, folder_name, storage
from distmp.errors import CheckpointError
from distmp.utils.units import bytes_text

logger = logging.getLogger("distmp")


def final_path(directory: Location, step: int) -> Location:
    """Return the path of the checkpoint of `step`; an object store may append a suffix."""
    return directory / folder_name(step)


def has_checkpoint(directory: Location, step: int) -> bool:
    """Return whether the checkpoint of `step` is there; True if the directory cannot be read."""
    try:
        return step in _by_step(storage(directory))
    except Exception as error:  # noqa: BLE001  (file systems of fsspec raise any type)
        logger.warning("cannot list the checkpoints in %s: %s", directory, error)
        return True


def discard(directory: Location, step: int) -> None:
    """Remove the files of a failed save of `step`; log it if that fails."""
    place = storage(directory)
    try:
        for entry in place.entries():
            if entry.step == step and not entry.finished:
                place.discard(entry.path)
    except Exception as error:  # noqa: BLE001  (file systems of fsspec raise any type)
        logger.warning(
            "cannot remove the unfinished checkpoint of step %d in %s: %s", step, directory, error
        )


def tidy(directory: Location, step: int, retention: Retention) -> None:
    """Apply the retention rules to the checkpoints up to `step`, and set later ones aside.

    As many of those that were set aside are kept as of the others, the latest ones, if there is
    room for them.

    A failure is logged and not raised: the new checkpoint is complete anyway.
    """
    place = storage(directory)
    try:
        # Before `clean`, and the latest one last: it stays the newest if this process is killed.
        # Every folder of a step: an object store keeps those of earlier attempts, too.
        later = [e.path for e in reversed(place.entries()) if e.finished and e.step > step]
        for path in later:
            aside = place.set_aside(path)
            logger.warning(
                "the run continued from an earlier step and saved step %d: the later checkpoint %s "
                "is set aside as %s",
                step,
                path,
                aside,
            )
        place.clean()
        by_step = _by_step(place)
        sizes = {s: _size(path) if retention.max_bytes else 0 for s, path in by_step.items()}
        states = _states(by_step)
        best = {s: state.best for s, state in states.items() if state.best is not None}
        surplus = retention.surplus(sizes, _possibly_unhealthy(states), best)
        for old in surplus:
            place.remove(by_step[old])
        kept = sum(size for s, size in sizes.items() if s not in surplus)
        _tidy_abandoned(place, retention, kept)
    except Exception as error:  # noqa: BLE001  (file systems of fsspec raise any type)
        logger.warning("cannot remove old checkpoints in %s: %s", directory, error)
        return
    if retention.max_bytes is not None and kept > retention.max_bytes:
        logger.warning(
            "the checkpoints in %s take %s, more than checkpoint.max_gib = %.3g: the latest "
            "checkpoint and those kept permanently are never removed",
            directory,
            bytes_text(kept),
            retention.max_bytes / 2**30,
        )


def _by_step(place: Storage[Any]) -> dict[int, Location]:
    """Return the finished checkpoints by step, in ascending order."""
    return {e.step: e.path for e in reversed(place.entries()) if e.finished}


def _tidy_abandoned(place: Storage[Any], retention: Retention, kept_bytes: int) -> None:
    for number, entry in enumerate(place.abandoned()):
        if retention.max_bytes is not None:
            kept_bytes += _size(entry.path)
        full = retention.max_bytes is not None and kept_bytes > retention.max_bytes
        if number >= retention.last or full:
            place.remove(entry.path)


def _states(by_step: Mapping[int, Location]) -> dict[int, State]:
    """Return the content of `state.json` by step, without damaged checkpoints."""
    states = {}
    for step, path in by_step.items():
        with contextlib.suppress(CheckpointError):
            states[step] = manifest.read(path)
    return states


def _possibly_unhealthy(states: Mapping[int, State]) -> set[int]:
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


def _size(path: Location) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
