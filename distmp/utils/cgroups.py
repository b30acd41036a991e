"""Reads the CPU and memory limits of this process from its control groups (version 2)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil


def core_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU limit in cores, or None without a limit.

    Args:
        root: Directory that contains `proc` and `sys`.
    """
    quotas = []
    for directory in _directories(root):
        words = _read(directory / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def usable_cores() -> int:
    """Return the number of cores on which this process may run, by affinity or PYTHON_CPU_COUNT."""
    if sys.version_info >= (3, 13):
        return os.process_cpu_count() or 1
    return len(os.sched_getaffinity(0))


def granted_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process can keep busy, at least 1.

    A quota of half a core counts as one, one of 3.5 cores as three: a thread more than the quota
    would stop all threads for part of each period.

    Args:
        root: Directory that contains `proc` and `sys`.
    """
    cores = usable_cores()
    return max(1, min(cores, int(core_quota(root) or cores)))


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory limit in bytes, or None without a limit.

    Args:
        root: Directory that contains `proc` and `sys`.
    """
    return min((limit for limit, _ in _memory_groups(root)), default=None)


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the free memory of this machine in bytes, at most what the memory limit leaves.

    Args:
        root: Directory that contains `proc` and `sys`.
    """
    free: int = psutil.virtual_memory().available
    return min([free, *(max(0, limit - used) for limit, used in _memory_groups(root))])


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the memory limit and the memory in use of each group that has a limit."""
    for directory in _directories(root):
        limit, used = _read(directory / "memory.max"), _read(directory / "memory.current")
        if limit.isdecimal():
            lines = map(str.split, _read(directory / "memory.stat").splitlines())
            # Like the kubelet: the kernel frees this part of the page cache first.
            cache = dict(line for line in lines if len(line) == 2).get("inactive_file", "0")
            yield int(limit), max(0, int(used or 0) - int(cache))


def _directories(root: Path) -> Iterator[Path]:
    """Yield the directories of this process's group and of its parents."""
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):  # the others are of version 1
            # In a container the path may be that of the host, and only the top is visible.
            group = top / line.removeprefix("0::").lstrip("/")
            while group != top and top in group.parents:
                yield group
                group = group.parent
            yield top


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
