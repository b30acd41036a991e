"""What there is to know about this machine; nothing here is judged."""

from __future__ import annotations

import csv
import os
import re
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from distmp.launcher.network import interfaces
from distmp.utils.cgroups import core_quota, memory_limit
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
    """A GPU as the driver describes it; None is what it does not tell.

    Attributes:
        name: Its kind.
        memory_bytes: All of its memory.
        used_bytes: What is taken, by whomever.
        ecc_errors: Memory errors since the last reboot that could not be corrected.
        throttled: Whether heat or power makes it run slower at this moment.
        driver: Version of the driver.
    """

    name: str
    memory_bytes: int | None
    used_bytes: int | None
    ecc_errors: int | None
    throttled: bool | None
    driver: str | None


@dataclass(frozen=True)
class Folder:
    """Where a run would be written.

    Attributes:
        path: The nearest folder that exists.
        free_bytes: What can still be written there.
        problem: Why a file could not be written there, or None.
    """

    path: str
    free_bytes: int
    problem: str | None


@dataclass(frozen=True)
class Clock:
    """The clocks of the machine.

    Attributes:
        steady: Whether the monotonic clock never went back in a thousand readings.
        synchronized: Whether the time of day is kept by a time service; None if nobody tells.
        offset_seconds: Its distance from the service's time; None if nobody tells.
    """

    steady: bool
    synchronized: bool | None
    offset_seconds: float | None


@dataclass(frozen=True)
class MachineInfo:
    """What was found on this machine.

    Attributes:
        hostname: Its name.
        addresses: What the name resolves to; empty if it does not.
        interfaces: The addresses of those that are up, by name.
        versions: Of Python, torch and so on; None for what is not installed.
        cuda_build: The CUDA version that torch was built for, or None.
        cuda_driver: The newest CUDA version that the driver runs, or None.
        cuda_devices: How many devices torch sees.
        gpus: What the driver says, whether or not torch can use them.
        native_dtypes: 16-bit types that the device of a run computes natively.
        cores: Of the machine.
        usable_cores: Those this process may run on.
        core_quota: Cores' worth of time that its control groups grant, or None.
        available_bytes: Memory that could still be taken.
        memory_limit: What its control groups grant, in bytes, or None.
        shm_bytes: Size of /dev/shm, or None if there is none.
        limits: Soft limits of open_files, processes and locked_bytes; None: no limit.
        rdma_devices: Names of InfiniBand and RoCE devices.
        folder: Where the run would be written.
        clock: The clocks.
        environment: The environment variables that change how a run behaves.
        policy: What the configured precision policy resolves to, and why.
        strategy: What the configured strategy resolves to with the ranks that `distmp launch`
            would start, and why so many.
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
    core_quota: float | None
    available_bytes: int
    memory_limit: int | None
    shm_bytes: int | None
    limits: Mapping[str, int | None]
    rdma_devices: tuple[str, ...]
    folder: Folder
    clock: Clock
    environment: Mapping[str, str]
    policy: str
    strategy: str


def gather(run_dir: str, policy: object, strategy: str) -> MachineInfo:
    """Look at this machine. Changes nothing, and takes a second or two.

    Args:
        run_dir: Where the run would be written.
        policy: The configured `precision.policy`.
        strategy: The configured `strategy`.
    """
    import torch

    header = _output("nvidia-smi")
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
        usable_cores=len(os.sched_getaffinity(0)),
        core_quota=core_quota(),
        available_bytes=psutil.virtual_memory().available,
        memory_limit=memory_limit(),
        shm_bytes=_size(Path("/dev/shm")),
        limits=_limits(),
        rdma_devices=_rdma_devices(),
        folder=_try_folder(Path(run_dir)),
        clock=_clock(),
        environment=relevant(os.environ),
        policy=_resolved_policy(policy),
        strategy=_resolved_strategy(strategy),
    )


def _resolved(hostname: str) -> tuple[str, ...]:
    try:
        return tuple(sorted({str(entry[4][0]) for entry in socket.getaddrinfo(hostname, None)}))
    except OSError:
        return ()


def _output(*command: str) -> str:
    """Return what a program prints; nothing if it is not there, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpus() -> tuple[Gpu, ...]:
    """Return what nvidia-smi says of the GPUs of this machine; empty where there is none."""
    query = ",".join(_GPU_QUERY.values())
    return parse_gpus(
        _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    )


def parse_gpus(table: str) -> tuple[Gpu, ...]:
    """Read what nvidia-smi answers to the query of this file, a line for each GPU."""
    gpus = []
    for words in csv.reader(table.splitlines(), skipinitialspace=True):
        told = dict(zip(_GPU_QUERY, words, strict=False))
        slowdowns = {told.get("hardware_slowdown"), told.get("thermal_slowdown")}
        gpus.append(
            Gpu(
                name=told.get("name", "?"),
                memory_bytes=_mebibytes(told.get("memory_bytes")),
                used_bytes=_mebibytes(told.get("used_bytes")),
                ecc_errors=_number(told.get("ecc_errors")),
                throttled="Active" in slowdowns if slowdowns & {"Active", "Not Active"} else None,
                driver=told.get("driver"),
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

    return tuple(str(dtype).removeprefix("torch.") for dtype in native_dtypes(local_device(0)))


def _size(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
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


def _try_folder(wanted: Path) -> Folder:
    """Write a file, force it to disk, and remove it."""
    folder = wanted.absolute()
    while not folder.is_dir() and folder != folder.parent:
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
    readings = [time.monotonic() for _ in range(1000)]
    steady = readings == sorted(readings)
    synchronized = {"yes": True, "no": False}.get(
        _output("timedatectl", "show", "--property=NTPSynchronized", "--value").strip()
    )
    tracking = _output("chronyc", "tracking")
    offset = parse_offset(tracking)
    if "Leap status" in tracking:
        synchronized = "Not synchronised" not in tracking
    return Clock(steady, synchronized, offset)


def parse_offset(tracking: str) -> float | None:
    """Return by how many seconds chrony says that the time of day is off, or None."""
    found = re.search(r"System time\s*:\s*([\d.]+) seconds (fast|slow)", tracking)
    return None if found is None else float(found[1]) * (1 if found[2] == "fast" else -1)


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
