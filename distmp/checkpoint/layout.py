"""Names the checkpoints in a directory and removes old ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from distmp.checkpoint.manifest import State, readable_state
from distmp.checkpoint.settings import Retention
from distmp.checkpoint.storage import LocalStorage, directory_name

logger = logging.getLogger("distmp")


def final_path(directory: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return directory / directory_name(step)


def has_checkpoint(directory: Path, step: int) -> bool:
    """Return whether the checkpoint of `step` exists; True if the directory cannot be read."""
    try:
        return step in _by_step(LocalStorage(directory))
    except OSError as error:
        logger.warning("cannot list the checkpoints in %s: %s", directory, error)
        return True


def discard(directory: Path, step: int) -> None:
    """Remove the files of a failed save of `step`; log it if that fails."""
    place = LocalStorage(directory)
    try:
        for entry in place.entries():
            if entry.step == step and not entry.finished:
                place.discard(entry.path)
    except OSError as error:
        logger.warning(
            "cannot remove the unfinished checkpoint of step %d in %s: %s", step, directory, error
        )


def tidy(directory: Path, step: int, retention: Retention) -> None:
    """Apply the retention rules to the checkpoints up to `step`, and set later ones aside.

    Keeps the latest of those set aside, as many as `retention.last`.

    A failure is logged and not raised: the new checkpoint is complete anyway.
    """
    place = LocalStorage(directory)
    try:
        # Before `clean`, and the latest one last: it stays the newest if this process is killed.
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
        found = {s: readable_state(path) for s, path in by_step.items()}
        states = {s: state for s, state in found.items() if state is not None}
        best = {s: state.best for s, state in states.items() if state.best is not None}
        for old in retention.surplus(by_step, _possibly_unhealthy(states), best):
            place.remove(by_step[old])
        for entry in place.abandoned()[retention.last :]:
            place.remove(entry.path)
    except OSError as error:
        logger.warning("cannot remove old checkpoints in %s: %s", directory, error)


def _by_step(place: LocalStorage) -> dict[int, Path]:
    """Return the finished checkpoints by step, in ascending order."""
    return {e.step: e.path for e in reversed(place.entries()) if e.finished}


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
