"""The manifest of a run: code, settings, machines and processes, with an entry per start."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from distmp.distributed import rendezvous_store
from distmp.distributed.world import World
from distmp.errors import DistmpError
from distmp.masking import masked
from distmp.training.run_directory import try_to_write
from distmp.utils.environment_info import relevant, versions
from distmp.utils.files import PRIVATE, replacing
from distmp.utils.settings import digest

logger = logging.getLogger("distmp")

_GIT_SECONDS = 5.0


class ManifestError(DistmpError, ValueError):
    """A file that is not a manifest."""


def record(
    path: Path,
    world: World,
    configuration: Mapping[str, Any],
    first_step: int = 0,
    low_precision_matmuls: Mapping[str, Any] | None = None,
) -> None:
    """Add this start of a run to its manifest; every rank has to call it, rank 0 writes.

    Args:
        path: The manifest.
        world: The ranks.
        configuration: The resolved configuration, nested.
        first_step: Steps done before this start.
        low_precision_matmuls: The low-precision matmuls, see
            `distmp.quantization.layers.formats_record`; None without any.

    Raises:
        SetupError: On every rank, if the file exists and is not a manifest.
    """
    own = {"host": socket.gethostname(), "pid": os.getpid(), "device": device_name(world)}
    ranks = world.ranks.gather(own)

    def write(path: Path) -> None:
        start = describe_start(configuration)
        if low_precision_matmuls is not None:
            start["low_precision_matmuls"] = low_precision_matmuls
        append(path, {**start, "first_step": first_step, "ranks": ranks})

    world.ranks.from_rank_0(lambda: try_to_write(path, write, logger.warning))


def describe_start(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of this start, without the ranks."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "restart": rendezvous_store.attempt(),
        "command": masked(sys.orig_argv),
        "working_directory": os.getcwd(),
        "configuration_hash": digest(masked(configuration)),
        "configuration": masked(configuration),
        "versions": versions(),
        "code": revision(Path.cwd()),
        "environment": relevant(os.environ),
    }


def device_name(world: World) -> str:
    """Return the device of a rank, with the model of the GPU."""
    if world.device.type != "cuda":
        return str(world.device)
    import torch

    return f"{world.device} ({torch.cuda.get_device_name(world.device)})"


def revision(directory: Path) -> dict[str, Any] | None:
    """Return the commit of a directory's git repository, and whether it has changes, or None.

    Args:
        directory: A directory of the repository.
    """
    if (commit := _git(directory, "rev-parse", "HEAD")) is None:
        return None
    status = _git(directory, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)
        if result.returncode == 0:
            return result.stdout.strip()
    return None


def append(path: Path, start: Mapping[str, Any]) -> None:
    """Add a start to the manifest of a run; the file is replaced atomically.

    Raises:
        ManifestError: If the file exists and is not a manifest.
    """
    starts = [*read(path), start] if path.exists() else [start]
    text = json.dumps({"starts": starts}, indent=2, default=str)
    with replacing(path, mode=PRIVATE) as file:
        file.write(text.encode() + b"\n")


def read(path: Path) -> Sequence[dict[str, Any]]:
    """Return all starts of a run, in order.

    Raises:
        ManifestError: If the file is not a manifest.
    """
    try:
        return [*json.loads(path.read_text())["starts"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path}: not a manifest ({error}); fix or delete it") from None
