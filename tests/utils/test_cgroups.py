"""CPU and memory limits of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from distmp.utils import processes
from distmp.utils.processes import core_quota, free_host_bytes, granted_cores, memory_limit


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        pytest.param({}, None, None, id="none at all"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job/step",
                "sys/fs/cgroup/job/cpu.max": "250000 100000",
                "sys/fs/cgroup/job/step/cpu.max": "max 100000",
                "sys/fs/cgroup/job/memory.max": "8000",
                "sys/fs/cgroup/job/step/memory.max": "5000",
            },
            2.5,
            5000,
            id="the lowest limit counts",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/cpu.max": "max 100000",
                "sys/fs/cgroup/memory.max": "max",
            },
            None,
            None,
            id="without limits",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "1:name=systemd:/x\n0::/docker/0123",
                "sys/fs/cgroup/cpu.max": "50000 100000",
                "sys/fs/cgroup/memory.max": "6000",
            },
            0.5,
            6000,
            id="in a container, which sees only its subtree",
        ),
    ],
)
def test_cgroup_limits_are_read(
    files: dict[str, str], cores: float | None, memory: int | None, tmp_path: Path
) -> None:
    root = write(tmp_path, files)
    assert core_quota(root) == cores
    assert memory_limit(root) == memory


@pytest.mark.parametrize(
    ("cores", "quota", "granted"),
    [(8, "50000", 1), (8, "350000", 3), (2, "800000", 2), (4, "max", 4)],
)
def test_cores_are_minimum_of_affinity_and_quota(
    cores: int, quota: str, granted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: cores)
    files = {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": f"{quota} 100000"}
    assert granted_cores(write(tmp_path, files)) == granted


def test_free_memory_respects_cgroup_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/memory.max": "9000",
        "sys/fs/cgroup/job/memory.current": "5000",
        # The kernel frees cached files before it ends a process.
        "sys/fs/cgroup/job/memory.stat": "anon 3000\nfile 2000\ninactive_file 1500\n",
    }
    assert free_host_bytes(write(tmp_path, files)) == 9000 - 5000 + 1500
    assert free_host_bytes(tmp_path / "none") > 9000
