"""Which checkpoints are in a directory, and which of them stay."""

from __future__ import annotations

import logging

from distmp.checkpoint.location import Location
from distmp.checkpoint.retention import Retention
from distmp.checkpoint.storage import folder_name, is_checkpoint, storage

logger = logging.getLogger("distmp")


def latest(directory: Location) -> Location | None:
    """Return the checkpoint of the highest step in `directory`, or None if there is none.

    Whether it is damaged is not looked at; see `recovery.usable`.
    """
    found = checkpoints(directory)
    return found[max(found)] if found else None


def checkpoints(directory: Location) -> dict[int, Location]:
    """Return the whole checkpoints in `directory` by step, in ascending order."""
    found: dict[int, Location] = {}
    for entry in storage(directory).entries():
        if entry.finished and entry.step not in found and is_checkpoint(entry.path):
            found[entry.step] = entry.path
    return dict(sorted(found.items()))


def final_path(directory: Location, step: int) -> Location:
    """Return where the checkpoint of `step` lies; on an object store an ending may follow."""
    return directory / folder_name(step)


def discard(directory: Location, step: int) -> None:
    """Remove what a save of `step` has left that failed; log it if that cannot be done."""
    place = storage(directory)
    try:
        for entry in place.entries():
            if entry.step == step and not entry.finished:
                place.discard(entry.path)
    except Exception as error:  # noqa: BLE001  (whatever a file system of fsspec raises)
        logger.warning("cannot remove what is left of step %d in %s: %s", step, directory, error)


def tidy(directory: Location, step: int, retention: Retention) -> None:
    """Remove what need not stay of the checkpoints up to `step`, and set later ones aside.

    What cannot be removed is logged: the new checkpoint is good all the same.
    """
    place = storage(directory)
    try:
        place.clean()
        found = {entry.step: entry.path for entry in reversed(place.entries()) if entry.finished}
        for later in [s for s in found if s > step]:
            path = found.pop(later)
            aside = place.set_aside(path)
            logger.warning(
                "the run went back to step %d: %s is abandoned, and kept as %s", step, path, aside
            )
        sizes = {s: _size(path) if retention.max_bytes else 0 for s, path in found.items()}
        going = retention.surplus(sizes)
        for old in going:
            place.remove(found[old])
    except Exception as error:  # noqa: BLE001  (whatever a file system of fsspec raises)
        logger.warning("cannot tidy up old checkpoints in %s: %s", directory, error)
        return
    staying = sum(size for s, size in sizes.items() if s not in going)
    if retention.max_bytes is not None and staying > retention.max_bytes:
        logger.warning(
            "the checkpoints in %s take %.3g GiB, more than checkpoint.max_gib = %.3g: the latest "
            "and those kept for good stay",
            directory,
            staying / 2**30,
            retention.max_bytes / 2**30,
        )


def _size(path: Location) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
