"""The checks of `distmp doctor`: each is a pure function of the machine's properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Literal, NamedTuple

from distmp.commands.doctor.machine_info import MachineInfo
from distmp.launcher.messages import assignment
from distmp.launcher.network import external_interfaces
from distmp.utils.units import bytes_text

Status = Literal["PASS", "WARN", "FAIL"]

_GIB = 1 << 30

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 10)
SMALL_SHM_BYTES = _GIB
LITTLE_MEMORY_BYTES = 2 * _GIB
LITTLE_DISK_BYTES = 10 * _GIB
NO_DISK_BYTES = _GIB
LITTLE_TEMPORARY_BYTES = 100 << 20
# The default limit of Linux; a rank keeps fewer than a hundred files open.
FEW_FILES = 1024
FEW_PROCESSES = 4096
BUSY_GPU_SHARE = 0.1
CLOCK_OFFSET_SECONDS = 1.0

# Variables that slow runs down, often left over from debugging.
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "makes the host wait for every kernel",
    "NCCL_IB_DISABLE": "disables InfiniBand in NCCL",
    "NCCL_P2P_DISABLE": "makes GPUs of one machine communicate through host memory",
    "NCCL_SHM_DISABLE": "makes ranks of one machine communicate through the network",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "disables the caching allocator",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "TORCH_COMPILE_DEBUG": "writes logs of everything that is compiled",
}
_VERBOSE = {"NCCL_DEBUG": ("INFO", "TRACE"), "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",)}
# Without error handling, a rank whose peer is gone waits without a limit.
_NO_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OFF = ("", "0", "false", "no", "off")


class CheckResult(NamedTuple):
    """The result of a check.

    Attributes:
        status: PASS; WARN if runs may be slow or unstable; FAIL if runs cannot work.
        message: The observation.
        remedy: What to do; empty for PASS.
    """

    status: Status
    message: str
    remedy: str = ""


Check = Callable[[MachineInfo], "Iterator[CheckResult]"]


def _versions(machine: MachineInfo) -> Iterator[CheckResult]:
    message = ", ".join(f"{name} {version or 'none'}" for name, version in machine.versions.items())
    for name, oldest in (("python", OLDEST_PYTHON), ("torch", OLDEST_TORCH)):
        if _release(machine.versions[name] or "0") < oldest:
            required = ".".join(map(str, oldest))
            yield CheckResult("FAIL", message, f"distmp needs {name} {required} or later")
            return
    yield CheckResult("PASS", message)


def _cuda(machine: MachineInfo) -> Iterator[CheckResult]:
    if machine.cuda_driver is None and machine.cuda_devices == 0:
        yield CheckResult("PASS", "no GPU; runs use the CPU")
    elif machine.cuda_build is None:
        yield CheckResult(
            "FAIL",
            f"the driver runs CUDA {machine.cuda_driver}, but this torch is built without CUDA",
            "install a build of torch for CUDA",
        )
    elif machine.cuda_driver and _release(machine.cuda_driver)[0] < _release(machine.cuda_build)[0]:
        yield CheckResult(
            "FAIL",
            f"torch is built for CUDA {machine.cuda_build}, the driver runs up to "
            f"{machine.cuda_driver}",
            f"install a newer driver, or a torch built for CUDA {_release(machine.cuda_driver)[0]}",
        )
    elif machine.cuda_devices == 0:
        yield CheckResult(
            "FAIL",
            "the driver is installed, but torch sees no GPU",
            "check CUDA_VISIBLE_DEVICES, nvidia-smi, and whether this container has access to GPUs",
        )
    else:
        driver = machine.cuda_driver or "of an unknown version"
        yield CheckResult(
            "PASS",
            f"{machine.cuda_devices} devices; torch for CUDA {machine.cuda_build}, driver {driver}",
        )


def _gpus(machine: MachineInfo) -> Iterator[CheckResult]:
    kinds = sorted({gpu.name for gpu in machine.gpus})
    if len(kinds) > 1:
        yield CheckResult(
            "WARN",
            f"different GPUs: {', '.join(kinds)}",
            "the slowest GPU limits the speed; select GPUs with CUDA_VISIBLE_DEVICES",
        )
    for index, gpu in enumerate(machine.gpus):
        name = f"GPU {index}, {gpu.name}"
        if gpu.ecc_errors:
            yield CheckResult(
                "FAIL",
                f"{name}: {gpu.ecc_errors} memory errors that were not corrected",
                "drain the machine and reset the GPU; replace it if they come back",
            )
        if gpu.throttled:
            yield CheckResult(
                "WARN",
                f"{name}: throttled because of temperature or power",
                "check `nvidia-smi -q -d PERFORMANCE,TEMPERATURE` and the cooling",
            )
        if gpu.memory_bytes and (gpu.used_bytes or 0) > BUSY_GPU_SHARE * gpu.memory_bytes:
            yield CheckResult(
                "WARN",
                f"{name}: {bytes_text(gpu.used_bytes or 0)} of its memory is in use",
                "see `nvidia-smi` for the processes that use it",
            )
    if machine.gpus:
        memory = ", ".join(f"{g.name} {bytes_text(g.memory_bytes or 0)}" for g in machine.gpus)
        yield CheckResult("PASS", memory)


def _dtypes(machine: MachineInfo) -> Iterator[CheckResult]:
    native = ", ".join(machine.native_dtypes) or "float32 only"
    yield CheckResult("PASS", f"computed natively: {native}")


def _choices(machine: MachineInfo) -> Iterator[CheckResult]:
    yield CheckResult("PASS", f"policy {machine.policy}; strategy {machine.strategy}")


def _cores(machine: MachineInfo) -> Iterator[CheckResult]:
    granted = min(machine.usable_cores, machine.core_quota or machine.cores)
    if granted < machine.cores:
        yield CheckResult("PASS", f"{granted:g} of {machine.cores} cores are available")
    else:
        yield CheckResult("PASS", f"{machine.cores} cores")


def _threads(machine: MachineInfo) -> Iterator[CheckResult]:
    text = machine.environment.get("OMP_NUM_THREADS")
    cores = machine.granted_cores
    if text is None:
        yield CheckResult("PASS", "OMP_NUM_THREADS is not set; `distmp launch` sets it")
    elif not text.isdecimal():
        yield CheckResult("WARN", f"OMP_NUM_THREADS={text} is not a number", "set it to a number")
    elif int(text) > cores:
        yield CheckResult(
            "WARN",
            f"OMP_NUM_THREADS={text}, with {cores} core{'s' if cores > 1 else ''} available",
            "set it to cores per rank, or unset it and use `distmp launch`",
        )
    else:
        yield CheckResult("PASS", f"OMP_NUM_THREADS={text}")


def _memory(machine: MachineInfo) -> Iterator[CheckResult]:
    free = machine.available_bytes
    limit = f", limit {bytes_text(machine.memory_limit)}" if machine.memory_limit else ""
    message = f"{bytes_text(free)} available{limit}"
    if free < LITTLE_MEMORY_BYTES:
        yield CheckResult("WARN", message, "end other processes, or raise the limit of the job")
    else:
        yield CheckResult("PASS", message)


def _shared_memory(machine: MachineInfo) -> Iterator[CheckResult]:
    users = ["data workers"] if machine.workers else []
    users += ["NCCL"] if machine.cuda_devices > 1 else []
    free, size = machine.shm_free_bytes, machine.shm_bytes
    if not users:
        yield CheckResult("PASS", "not needed without data workers and with up to one GPU")
    elif size is None or free is None:
        yield CheckResult(
            "FAIL",
            f"/dev/shm is missing, through which {' and '.join(users)} exchange data",
            "mount a tmpfs there (`docker run --shm-size=16g`; in Kubernetes an emptyDir with "
            "medium: Memory)",
        )
    elif size < SMALL_SHM_BYTES:
        yield CheckResult(
            "WARN",
            f"/dev/shm has {bytes_text(size)}; {' and '.join(users)} may fill it",
            "`docker run --shm-size=16g`, in Kubernetes an emptyDir with medium: Memory",
        )
    elif free < SMALL_SHM_BYTES:
        yield CheckResult(
            "WARN",
            f"/dev/shm has {bytes_text(free)} free of {bytes_text(size)}; {' and '.join(users)} "
            "may fill it",
            "remove files that ended processes have left there (`ls -l /dev/shm`)",
        )
    else:
        yield CheckResult("PASS", f"/dev/shm has {bytes_text(free)} free of {bytes_text(size)}")


def _limits(machine: MachineInfo) -> Iterator[CheckResult]:
    files, processes = machine.limits["open_files"], machine.limits["processes"]
    locked = machine.limits["locked_bytes"]
    if files is not None and files < FEW_FILES:
        yield CheckResult(
            "WARN", f"at most {files} open files", "`ulimit -n 65536` before the launch"
        )
    if processes is not None and processes < FEW_PROCESSES:
        yield CheckResult("WARN", f"at most {processes} processes", "`ulimit -u 65536`")
    if locked is not None and machine.rdma_devices:
        yield CheckResult(
            "FAIL",
            f"at most {bytes_text(locked)} of locked memory, but {', '.join(machine.rdma_devices)} "
            "has to lock its buffers",
            "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1`",
        )
    limits = ", ".join(f"{name} {_limit(limit)}" for name, limit in machine.limits.items())
    yield CheckResult("PASS", limits)


def _disk(machine: MachineInfo) -> Iterator[CheckResult]:
    folder = machine.folder
    message = f"{folder.path}: {bytes_text(folder.free_bytes)} free"
    if folder.problem is not None:
        yield CheckResult(
            "FAIL", f"{folder.path}: cannot be written ({folder.problem})", "use another run_dir"
        )
    elif folder.free_bytes < NO_DISK_BYTES:
        yield CheckResult("FAIL", message, "free space for checkpoints, or use another run_dir")
    elif folder.free_bytes < LITTLE_DISK_BYTES:
        yield CheckResult("WARN", message, "free space for checkpoints, or use another run_dir")
    else:
        yield CheckResult("PASS", f"{message}, writing a file succeeded")


def _temporary_files(machine: MachineInfo) -> Iterator[CheckResult]:
    folder = machine.temporary
    message = f"{folder.path}: {bytes_text(folder.free_bytes)} free"
    if folder.problem is not None:
        yield CheckResult(
            "FAIL",
            f"{folder.path}: cannot be written ({folder.problem})",
            "free space there, or set TMPDIR to a folder that can be written; torchrun and "
            "compilers write to it",
        )
    elif folder.free_bytes < LITTLE_TEMPORARY_BYTES:
        yield CheckResult("WARN", message, "free space there, or set TMPDIR to another folder")
    else:
        yield CheckResult("PASS", message)


def _clock(machine: MachineInfo) -> Iterator[CheckResult]:
    clock = machine.clock
    service = "enable a time service (chrony, systemd-timesyncd); else the logs of machines differ"
    if abs(clock.offset_seconds or 0.0) > CLOCK_OFFSET_SECONDS:
        yield CheckResult("WARN", f"the clock is off by {clock.offset_seconds:.3g} s", service)
    elif clock.synchronized is False:
        yield CheckResult("WARN", "the clock is not synchronized by a time service", service)
    elif clock.synchronized is None:
        yield CheckResult("PASS", "unknown whether it is synchronized")
    else:
        yield CheckResult("PASS", "synchronized by a time service")


def _hostname(machine: MachineInfo) -> Iterator[CheckResult]:
    own = {address for addresses in machine.interfaces.values() for address in addresses}
    if not machine.addresses:
        yield CheckResult(
            "WARN",
            f"{machine.hostname} does not resolve",
            "add it to /etc/hosts; gloo and torchrun resolve their own name",
        )
    elif all(ip_address(address).is_loopback for address in machine.addresses):
        yield CheckResult(
            "PASS",
            f"{machine.hostname} resolves to {', '.join(machine.addresses)}; `distmp launch` "
            "selects an address that other machines can reach",
        )
    elif not own & set(machine.addresses):
        yield CheckResult(
            "WARN",
            f"{machine.hostname} is {', '.join(machine.addresses)}, which no interface has",
            "fix /etc/hosts or DNS; with several machines set GLOO_SOCKET_IFNAME",
        )
    else:
        yield CheckResult("PASS", f"{machine.hostname} is {', '.join(machine.addresses)}")


def _network(machine: MachineInfo) -> Iterator[CheckResult]:
    names = machine.interfaces.keys()
    listed = ", ".join(f"{name} {machine.interfaces[name][0]}" for name in names) or "none"
    gloo = machine.environment.get("GLOO_SOCKET_IFNAME")
    missing = [name for name in (gloo or "").split(",") if name and name not in names]
    if missing:
        yield CheckResult(
            "FAIL",
            f"GLOO_SOCKET_IFNAME={gloo}, but {', '.join(missing)} does not exist; interfaces: "
            f"{listed}",
            "set it to an interface that is up, or unset it",
        )
    nccl = machine.environment.get("NCCL_SOCKET_IFNAME")
    if nccl and not any(_nccl_matches(nccl, name) for name in names):
        yield CheckResult(
            "FAIL",
            f"{assignment('NCCL_SOCKET_IFNAME', nccl)} matches none of the interfaces: {listed}",
            "set it to an interface that is up, or unset it",
        )
    for name, setting in (("GLOO_SOCKET_IFNAME", gloo), ("NCCL_SOCKET_IFNAME", nccl)):
        if setting and setting.lstrip("=") == "lo":
            yield CheckResult(
                "WARN",
                f"{assignment(name, setting)}, through which no other machine can be reached",
                "unset it; `distmp launch` selects the interface",
            )
    if machine.environment.get("NCCL_NET", "").upper() == "IB" and (
        machine.cuda_devices and not machine.rdma_devices
    ):
        yield CheckResult(
            "FAIL",
            "NCCL_NET=IB, but there is no InfiniBand or RoCE device: NCCL would not start",
            "unset NCCL_NET, or give this container access to the devices (/dev/infiniband)",
        )
    if not external_interfaces(machine.interfaces):
        yield CheckResult("PASS", f"runs on this machine only; interfaces: {listed}")
    else:
        yield CheckResult(
            "PASS",
            f"interfaces: {listed}; gloo uses {gloo or _gloo_default(machine)}, NCCL "
            f"{nccl or _nccl_default(machine)}",
        )


def _environment(machine: MachineInfo) -> Iterator[CheckResult]:
    variables = machine.environment
    for name, effect in _SLOW.items():
        if variables.get(name, "").lower() not in _OFF:
            yield CheckResult("WARN", f"{name}={variables[name]} {effect}", f"unset {name}")
    for name, values in _VERBOSE.items():
        if variables.get(name, "").upper() in values:
            message = f"{name}={variables[name]} writes a lot and slows runs down"
            yield CheckResult("WARN", message, f"unset {name}")
    for name in _NO_ERROR_HANDLING:
        if variables.get(name) == "0":
            yield CheckResult(
                "FAIL", f"{name}=0: ranks wait without a limit when one dies", f"unset {name}"
            )
    ranks = [name for name in _RANK_VARIABLES if name in variables]
    if ranks:
        yield CheckResult(
            "WARN",
            f"{', '.join(ranks)} is set: a process started here becomes a rank of a run",
            "unset it, unless this process is a rank",
        )
    network = [name for name in variables if name.startswith(("NCCL_", "GLOO_"))]
    yield CheckResult("PASS", f"network variables: {', '.join(network) or 'none'}")


# The checks by name, in the order of the output.
CHECKS: dict[str, Check] = {
    "versions": _versions,
    "CUDA": _cuda,
    "GPUs": _gpus,
    "types": _dtypes,
    "choices": _choices,
    "cores": _cores,
    "threads": _threads,
    "memory": _memory,
    "shared memory": _shared_memory,
    "limits": _limits,
    "disk": _disk,
    "temporary files": _temporary_files,
    "clock": _clock,
    "hostname": _hostname,
    "network": _network,
    "environment": _environment,
}


def run_checks(machine: MachineInfo) -> list[tuple[str, CheckResult]]:
    """Return the problems of every check by name, or its PASS if there are none."""
    results = []
    for name, check in CHECKS.items():
        outcomes = list(check(machine))
        problems = [result for result in outcomes if result.status != "PASS"]
        results += [(name, result) for result in problems or outcomes]
    return results


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: "2.13.0+cu130" -> (2, 13)."""
    numbers = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdecimal, number)) or 0) for number in numbers)


def _limit(limit: int | None) -> str:
    return "unlimited" if limit is None else str(limit)


def _nccl_matches(setting: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME allows an interface: prefixes, `=` exact, `^` excludes."""
    names = setting.lstrip("^=").split(",")
    if setting.startswith("^"):
        return not any(name.startswith(prefix) for prefix in names)
    if setting.startswith("="):
        return name in names
    return any(name.startswith(prefix) for prefix in names)


def _gloo_default(machine: MachineInfo) -> str:
    """Return the interface with the address of the hostname, which gloo tries first."""
    for name, addresses in machine.interfaces.items():
        if not {*addresses}.isdisjoint(machine.addresses):
            return name
    return "the loopback"


def _nccl_default(machine: MachineInfo) -> str:
    """Return NCCL's default interfaces: InfiniBand, then others, then Docker's bridge."""
    names = external_interfaces(machine.interfaces)
    infiniband = [name for name in names if name.startswith("ib")]
    others = [name for name in names if not name.startswith("docker")]
    return ", ".join(infiniband or others or names)
