"""Which collectives this rank has started: torch's counters and torch's flight recorder.

Each backend of a process group counts its collectives when the host starts them. The same number is
the same collective on every rank of the group, so a rank with a smaller number is behind, no
matter what its host waits for. The flight recorder is a ring buffer of the latest collectives in
the memory of each rank, with sizes, dtypes, states and stacks.

All functions may be called in a thread while the main thread is in a collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from distmp.errors import rank_names

# Both names of torch's setting; the first one has priority.
SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Number of collectives that are recorded, about 1 MB; the default of recent versions of torch.
ENTRIES = 2000
# Number of pending collectives of a group that `pending` returns.
MAX_PENDING = 64
# Time after which a dump that blocks ends the process.
BLOCKED_SECONDS = 60.0
# torch's private functions that return the contents of a recorder, by backend.
_DUMP = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}


def enable() -> None:
    """Record the collectives of the process groups that are created after this call.

    A size that the user has set in the environment is kept; 0 disables the recorder.
    """
    if not any(name in os.environ for name in SIZE_VARIABLES):
        os.environ[SIZE_VARIABLES[0]] = str(ENTRIES)


def started() -> dict[str, int]:
    """Return how many collectives this rank has started, by group and backend.

    The keys are text that is the same on every rank of a group. Groups of one rank are left out.
    """
    return {label: number for label, _, _, number in _groups()}


def pending() -> dict[str, list[tuple[int, str]]]:
    """Return the recorded collectives that have not completed, with the keys of `started`.

    Returns:
        Number and name of each collective, in ascending order, at most `MAX_PENDING` for a group.
    """
    recorded = {backend: _entries(backend) for backend in _DUMP}
    found = {
        label: sorted(
            {
                (entry["collective_seq_id"], entry["profiling_name"].rpartition(":")[2])
                for entry in recorded.get(backend, ())
                if entry["process_group"][0] == name and _is_pending(entry)
            }
        )
        for label, name, backend, _ in _groups()
    }
    return {label: collectives[:MAX_PENDING] for label, collectives in found.items() if collectives}


def _groups() -> Iterator[tuple[str, str, str, int]]:
    """Yield label, torch's name, backend and number of collectives, by group and backend."""
    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        # The main thread may destroy the group meanwhile; not every backend counts.
        with contextlib.suppress(RuntimeError, LookupError, AttributeError):
            yield from _counted(group)


def _counted(group: dist.ProcessGroup) -> list[tuple[str, str, str, int]]:
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return []
    label, name = _label(group, ranks), group.group_name
    return [
        (f"{label} ({backend})", name, backend, int(counts._get_sequence_number_for_group()))
        for backend, counts in _backends(group).items()
    ]


def _backends(group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the backends of a group by name; one of them may be used for several devices."""
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    return {backend.name(): backend for backend in backends}


def _label(group: dist.ProcessGroup, ranks: list[int]) -> str:
    if group is dist.group.WORLD:
        return "the default group"
    description = group.group_desc
    described = "" if description in ("", "undefined") else f" '{description}'"
    return f"group {group.group_name}{described} of {rank_names(sorted(ranks))}"


def _entries(backend: str) -> list[dict[str, Any]]:
    """Return the entries of a recorder; empty if torch has none for the backend."""
    dump_json = getattr(getattr(torch._C, "_distributed_c10d", None), _DUMP[backend], None)
    if dump_json is None:
        return []
    # NCCL's recorder queries CUDA events. That may block, with the GIL, if the device hangs, and no
    # thread could end the process then: print the stacks of all threads, and exit.
    faulthandler.dump_traceback_later(BLOCKED_SECONDS, exit=True)
    try:
        text = dump_json()
    finally:
        faulthandler.cancel_dump_traceback_later()
    entries: list[dict[str, Any]] = json.loads(text).get("entries") or []
    return [entry for entry in entries if entry["profiling_name"].startswith(f"{backend}:")]


def _is_pending(entry: dict[str, Any]) -> bool:
    # Gloo only sets `retired`, NCCL `state` as soon as it is known.
    return not (entry["is_p2p"] or entry["retired"] or entry["state"] == "completed")
