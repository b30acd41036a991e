"""Collect the properties of this machine, without judging them."""

from __future__ import annotations

import csv
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from distmp.config import RunConfig
from distmp.launcher.network import interfaces
from distmp.utils.cgroups import (
    core_quota,
    free_host_bytes,
    granted_cores,
    memory_limit,
    usable_cores,
)
from distmp.utils.environment_info import relevant, versions

_COMMAND_SECONDS = 10.0
_WRITTEN_BYTES = 1 << 20

_GPU_QUERY = {
    "name": "name",
    "memory_bytes": "memory.total",
    "used_bytes": "memory.used",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "hardware_slowdown": "clocks_throttle_reasons.hw_slowdown",
    "thermal_slowdown": "clocks_throttle_reasons.sw_thermal_slowdown",
    "driver": "driver_version",
}


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that the driver reports; None if it does not.

    Attributes:
        name: Name of the model.
        memory_bytes: Size of its memory.
        used_bytes: Memory in use by all processes.
        ecc_errors: Number of uncorrected memory errors since the last reboot.
        throttled: Whether it is currently throttled because of temperature or power.
        driver: Version of the driver.
    """

    name: str
    memory_bytes: int | None
    used_bytes: int | None
    ecc_errors: int | None
    throttled: bool | None
    driver: str | None


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


@dataclass(frozen=True)
class Folder:
    """The folder of a run.

    Attributes:
        path: The nearest existing folder.
        free_bytes: Free space.
        problem: Why a file could not be written there, or None.
    """

    path: str
    free_bytes: int
    problem: str | None


@dataclass(frozen=True)
class Clock:
    """The clock of the machine.

    Attributes:
        synchronized: Whether a time service synchronizes the time of day; None if unknown.
        offset_seconds: Offset from the time of the service; None if unknown.
    """

    synchronized: bool | None
    offset_seconds: float | None


@dataclass(frozen=True)
class MachineInfo:
    """The properties of this machine.

    Attributes:
        hostname: Name of the machine.
        addresses: The addresses of the name; empty if it does not resolve.
        interfaces: The addresses of each interface that is up, by name.
        versions: Versions of Python, torch and so on; None if not installed.
        cuda_build: The CUDA version for which torch was built, or None.
        cuda_driver: The newest CUDA version that the driver supports, or None.
        cuda_devices: Number of devices that torch sees.
        gpus: The GPUs that the driver reports, whether or not torch can use them.
        native_dtypes: 16-bit dtypes that the device of a run computes natively.
        cores: Number of cores of the machine.
        usable_cores: Number of cores on which this process may run.
        granted_cores: Number of cores that it can keep busy.
        core_quota: CPU quota of its control groups in cores, or None.
        available_bytes: Available memory, within the limit of its control groups.
        memory_limit: Memory limit of its control groups in bytes, or None.
        shm_bytes: Size of /dev/shm, or None if it is missing.
        shm_free_bytes: Free space of /dev/shm, or None if it is missing.
        workers: Data workers of a rank.
        limits: Soft limits of open_files, processes and locked_bytes; None if unlimited.
        rdma_devices: Names of InfiniBand and RoCE devices.
        folder: The folder of the run.
        temporary: The folder of temporary files.
        clock: The clock.
        environment: The environment variables that change how a run behaves.
        policy: The resolved precision policy, and why.
        strategy: The resolved strategy for the ranks that `distmp launch` would start, and why.
    """

    hostname: str
    addresses: tuple[str, ...]
    interfaces: Mapping[str, tuple[str, ...]]
    versions: Mapping[str, str | None]
    cuda_build: str | None
    cuda_driver: str | None
    cuda_devices: int
    gpus: tuple[Gpu, ...]
    native_dtypes: tuple[str, ...]
    cores: int
    usable_cores: int
    granted_cores: int
    core_quota: float | None
    available_bytes: int
    memory_limit: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    workers: int
    limits: Mapping[str, int | None]
    rdma_devices: tuple[str, ...]
    folder: Folder
    temporary: Folder
    clock: Clock
    environment: Mapping[str, str]
    policy: str
    strategy: str


def gather(config: RunConfig) -> MachineInfo:
    """Collect the properties of this machine in one or two seconds, without changing it.

    Args:
        config: The run for which the machine is checked.
    """
    import torch

    header = _output("nvidia-smi")
    shm = _usage(Path("/dev/shm"))
    driver = re.search(r"CUDA[\w ]* Version\s*:\s*([\d.]+)", header)
    return MachineInfo(
        hostname=(hostname := socket.gethostname()),
        addresses=_resolved(hostname),
        interfaces=interfaces(),
        versions=versions(),
        cuda_build=torch.version.cuda,
        cuda_driver=driver[1] if driver else None,
        cuda_devices=torch.cuda.device_count(),
        gpus=gpus() if header else (),
        native_dtypes=_native_dtypes(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        granted_cores=granted_cores(),
        core_quota=core_quota(),
        available_bytes=free_host_bytes(),
        memory_limit=memory_limit(),
        shm_bytes=shm and shm.total,
        shm_free_bytes=shm and shm.free,
        workers=config.data.workers,
        limits=_limits(),
        rdma_devices=_rdma_devices(),
        folder=_try_folder(Path(config.run_dir)),
        temporary=_try_folder(Path(os.environ.get("TMPDIR") or "/tmp")),
        clock=_clock(),
        environment=relevant(os.environ),
        policy=_resolved_policy(config.precision.policy),
        strategy=_resolved_strategy(config.strategy),
    )


def _resolved(hostname: str) -> tuple[str, ...]:
    try:
        return tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(hostname, None)}))
    except OSError:
        return ()


def _output(*command: str) -> str:
    """Return the output of a program; empty if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that nvidia-smi reports; empty without any."""
    query = ",".join(_GPU_QUERY.values())
    return parse_gpus(
        _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    )


def parse_gpus(table: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's output for the query of this file, with one line per GPU."""
    gpus = []
    for cells in csv.reader(table.splitlines(), skipinitialspace=True):
        values = dict(zip(_GPU_QUERY, cells, strict=False))
        slowdowns = {values.get("hardware_slowdown"), values.get("thermal_slowdown")}
        gpus.append(
            Gpu(
                name=values.get("name", "?"),
                memory_bytes=_mebibytes(values.get("memory_bytes")),
                used_bytes=_mebibytes(values.get("used_bytes")),
                ecc_errors=_number(values.get("ecc_errors")),
                throttled="Active" in slowdowns if slowdowns & {"Active", "Not Active"} else None,
                driver=values.get("driver"),
            )
        )
    return tuple(gpus)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _mebibytes(text: str | None) -> int | None:
    number = _number(text)
    return None if number is None else number << 20


def _native_dtypes() -> tuple[str, ...]:
    from distmp.distributed.world import local_device
    from distmp.precision.hardware import native_dtypes
    from distmp.utils.dtypes import dtype_name

    return tuple(dtype_name(dtype) for dtype in native_dtypes(local_device(0)))


def _usage(path: Path) -> _Usage | None:
    try:
        return _Usage(*shutil.disk_usage(path))
    except OSError:
        return None


def _limits() -> dict[str, int | None]:
    numbers = {
        "open_files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
        "locked_bytes": resource.RLIMIT_MEMLOCK,
    }
    soft = {name: resource.getrlimit(number)[0] for name, number in numbers.items()}
    return {name: None if n == resource.RLIM_INFINITY else n for name, n in soft.items()}


def _rdma_devices() -> tuple[str, ...]:
    folder = Path("/sys/class/infiniband")
    return tuple(sorted(os.listdir(folder))) if folder.is_dir() else ()


def _try_folder(path: Path) -> Folder:
    """Write a file, fsync it, and remove it."""
    folder = path.absolute()
    # A folder in a file, and one that this user may not see, have no existing parent but their own.
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    problem = None
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".distmp-doctor-") as file:
            file.write(os.urandom(_WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    return Folder(str(folder), shutil.disk_usage(folder).free, problem)


def _clock() -> Clock:
    synchronized = {"yes": True, "no": False}.get(
        _output("timedatectl", "show", "--property=NTPSynchronized", "--value").strip()
    )
    tracking = _output("chronyc", "tracking")
    offset = parse_offset(tracking)
    if "Leap status" in tracking:
        synchronized = "Not synchronised" not in tracking
    return Clock(synchronized, offset)


def parse_offset(tracking: str) -> float | None:
    """Return the offset of the time of day that chrony reports, in seconds, or None."""
    match = re.search(r"System time\s*:\s*([\d.]+) seconds (fast|slow)", tracking)
    return None if match is None else float(match[1]) * (1 if match[2] == "fast" else -1)


def _resolved_policy(policy: object) -> str:
    from distmp.distributed.world import local_device
    from distmp.precision import resolve

    resolved, reason = resolve(policy, local_device(0))  # type: ignore[arg-type]
    return f"{resolved.name} ({reason})"


def _resolved_strategy(strategy: str) -> str:
    import torch

    from distmp.distributed.world import World
    from distmp.launcher.local import default_ranks
    from distmp.parallel import resolve_strategy

    ranks, reason = (1, "as configured") if strategy == "single" else default_ranks()
    chosen = resolve_strategy(strategy, World(0, ranks, torch.device("cpu"), None))
    return f"{chosen} on {ranks} rank{'s' if ranks > 1 else ''} ({reason})"
