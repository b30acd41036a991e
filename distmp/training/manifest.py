"""What a run was: which code, settings, machines and processes; an entry for each of its starts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distmp.distributed import rendezvous_store
from distmp.distributed.world import World, all_or_none
from distmp.errors import DistmpError
from distmp.utils.environment_info import relevant, versions
from distmp.utils.files import replacing
from distmp.utils.settings.flat import digest

logger = logging.getLogger("distmp")

_GIT_SECONDS = 5.0
HIDDEN = "***"
_SECRETS = ("token", "key", "secret", "password", "credential", "credentials")


class ManifestError(DistmpError, ValueError):
    """A manifest that is none."""


def record(path: Path, world: World, configuration: Mapping[str, Any], first_step: int = 0) -> None:
    """Add this start of a run to its manifest; every rank has to call it, rank 0 writes.

    Args:
        path: The manifest.
        world: The ranks.
        configuration: The resolved configuration, nested.
        first_step: Steps that were done when it began.

    Raises:
        SetupError: On every rank, if the file is there and is no manifest.
    """
    own = {"host": socket.gethostname(), "pid": os.getpid(), "device": device_name(world)}
    ranks: list[Any] = [own]
    if world.group is not None:
        ranks = [None] * world.world_size
        dist.all_gather_object(ranks, own, group=world.group)

    def write() -> None:
        if world.rank != 0:
            return
        try:
            start = describe_start(configuration)
            append(path, {**start, "first_step": first_step, "ranks": ranks})
        except OSError as error:
            logger.warning("cannot write %s: %s; the run goes on without it", path, error)

    all_or_none(world, write)


def describe_start(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return what there is to say of this start, besides who takes part."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "restart": rendezvous_store.restarts(),
        "command": [without_secrets(word) for word in sys.orig_argv],
        "working_directory": os.getcwd(),
        "configuration_hash": digest(configuration),
        "configuration": masked(configuration),
        "versions": versions(),
        "code": {
            "working_directory": revision(Path.cwd()),
            "distmp": revision(Path(__file__).parent, tracked=Path(__file__).name),
        },
        "environment": relevant(os.environ),
    }


def masked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which secrets, by the end of their name, are replaced."""
    return {
        name: masked(value)
        if isinstance(value, Mapping)
        else HIDDEN
        if isinstance(value, str) and name.lower().endswith(_SECRETS)
        else value
        for name, value in values.items()
    }


def without_secrets(word: str) -> str:
    """Return a word of a command line, hidden if it is a mapping that names a secret."""
    keys = re.findall(r"[\w-]+(?=[\"']?\s*:)", word)
    secret = "{" in word and any(key.lower().endswith(_SECRETS) for key in keys)
    return word.partition("{")[0] + HIDDEN if secret else word


def device_name(world: World) -> str:
    """Return where a rank computes, with the kind of GPU."""
    if world.device.type != "cuda":
        return str(world.device)
    import torch

    return f"{world.device} ({torch.cuda.get_device_name(world.device)})"


def revision(folder: Path, tracked: str | None = None) -> dict[str, Any] | None:
    """Return commit and cleanliness of the git repository around a folder, or None without one.

    Args:
        folder: A folder in it.
        tracked: A file of the folder that has to belong to the repository: an installed package
            may happen to lie inside somebody's.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if tracked is not None and _git(folder, "ls-files", "--error-unmatch", tracked) is None:
        return None
    if commit is None:
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def append(path: Path, start: Mapping[str, Any]) -> None:
    """Add a start to the manifest of a run, which is replaced whole.

    Raises:
        ManifestError: If the file is there and is no manifest.
    """
    starts = [*read(path), start] if path.exists() else [start]
    text = json.dumps({"starts": starts}, indent=2, default=str)
    with replacing(path) as file:
        file.write(text.encode() + b"\n")


def starts_at(path: Path, step: int) -> int:
    """Return how many jobs in a row, the last one among them, began a run at `step`.

    Ranks that were started again within a job count with it. Without a manifest nothing is known.
    """
    try:
        jobs = [start for start in read(path) if start.get("restart") == 0]
    except OSError:
        return 0
    return len(list(takewhile(lambda job: job.get("first_step") == step, reversed(jobs))))


def read(path: Path) -> Sequence[dict[str, Any]]:
    """Return all starts of a run, the first one first.

    Raises:
        ManifestError: If the file is no manifest.
    """
    try:
        starts = json.loads(path.read_text())["starts"]
        if not isinstance(starts, list):
            raise TypeError("'starts' is no list")
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"{path}: not a manifest ({error}); mend or delete it") from None
    return starts
