"""Reads the CPU and memory limits of this process from its control groups, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

# Version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT_BYTES = 1 << 60


def core_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU limit in cores, or None without a limit.

    Args:
        root: Folder that contains `proc` and `sys`.
    """
    quotas = []
    for folder in _folders(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the memory limit in bytes, or None without a limit.

    Args:
        root: Folder that contains `proc` and `sys`.
    """
    limits = [
        int(text)
        for folder in _folders(root, "memory")
        for text in (_read(folder / "memory.max"), _read(folder / "memory.limit_in_bytes"))
        if text.isdecimal()
    ]
    return min((limit for limit in limits if limit < _NO_LIMIT_BYTES), default=None)


def free_host_bytes() -> int:
    """Return the free memory of this machine in bytes, at most the memory limit."""
    free: int = psutil.virtual_memory().available
    return min(free, memory_limit() or free)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of its parents, for one controller."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one tree and does not name controllers.
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        # In a container the path may be that of the host, and only the top folder is visible.
        group = top / path.lstrip("/")
        while group != top and top in group.parents:
            yield group
            group = group.parent
        yield top


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
