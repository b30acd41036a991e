"""Check that all machines see the folder to which their ranks write checkpoints."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from distmp.checkpoint.location import locate
from distmp.config import RunConfig
from distmp.launcher.preflight.store import PreflightStore

# A network file system may show a new file late.
_APPEARS_SECONDS = 5.0
_POLL_SECONDS = 0.1


def ranks_without_folder(
    store: PreflightStore, config: RunConfig, first_ranks: Sequence[int]
) -> list[int]:
    """Return the ranks that do not see a file that rank 0 writes beside the checkpoints.

    Every rank writes its part of a checkpoint, so all machines need the same folder. The other
    files of a run are written and read by one rank each.

    Args:
        store: The store of the ranks.
        config: The configuration of the run.
        first_ranks: The first rank of each machine; only these look for the file.

    Returns:
        The ranks on rank 0; an empty list on the others.
    """
    if store.rank == 0:
        with _new_file(_folder(config)) as name:
            store.put("file", name)
            return [rank for rank in first_ranks[1:] if not store.get(f"file/{rank}")]
    if store.rank in first_ranks:
        name = store.get("file")
        store.put(f"file/{store.rank}", name is None or _appears(Path(name)))
    return []


def not_shared(config: RunConfig, ranks: str, host: str) -> str:
    """Return the message about ranks that do not see the folder.

    Args:
        config: The configuration of the run.
        ranks: Names of the ranks.
        host: The machine of rank 0.
    """
    setting = "run_dir" if config.checkpoint.path is None else "checkpoint.path"
    value = config.checkpoint.path or config.run_dir
    return (
        f"{setting} = {value!r} is not the same folder on all machines: {ranks} cannot see what "
        f"rank 0 ({host}) writes there, so no checkpoint could be written; set run_dir or "
        "checkpoint.path to a folder on shared storage, or checkpoint.path to a URL such as "
        "s3://bucket/folder"
    )


def _folder(config: RunConfig) -> Path | None:
    """Return the nearest existing folder above the checkpoints; None for an object store."""
    folder = Path(config.run_dir)
    if config.checkpoint.path is not None:
        location = locate("checkpoint.path", config.checkpoint.path)
        if not isinstance(location, Path):
            return None
        folder = location
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.is_dir()), None)


@contextmanager
def _new_file(folder: Path | None) -> Iterator[str | None]:
    """Create a file for the duration of a block; yield its path, or None if that is impossible."""
    if folder is None:
        yield None
        return
    with ExitStack() as stack:
        name = None
        # The run reports a folder that cannot be written when it creates its own.
        with suppress(OSError):
            name = stack.enter_context(
                tempfile.NamedTemporaryFile(dir=folder, prefix=".distmp-preflight-")
            ).name
        yield name


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _APPEARS_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
