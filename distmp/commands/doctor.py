"""`distmp doctor`: check whether this machine is ready to train."""

from __future__ import annotations

import csv
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from distmp.config import RunConfig
from distmp.distributed.rank_environment import VARIABLES
from distmp.utils.environment_info import versions
from distmp.utils.processes import output_of
from distmp.utils.units import bytes_text, text_table

_LITTLE_SHM_BYTES = 1 << 30
_LITTLE_DISK_BYTES = 10 << 30
_NO_DISK_BYTES = 1 << 30
# The default limit of Linux; a rank keeps fewer than a hundred files open.
_FEW_FILES = 1024
_BUSY_GPU_SHARE = 0.1
_COMMAND_SECONDS = 10.0
_WRITTEN_BYTES = 1 << 20

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
# Without error handling, a rank whose peer is gone waits without a limit.
_NO_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_OFF = ("", "0", "false", "no", "off")

# The messages of a run are not about the machine.
_FAILED_RUN = "after a failed run, see logs in its run directory, and `distmp report RUN_DIRECTORY`"

_GPU_QUERY = (
    "name,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,"
    "clocks_throttle_reasons.hw_slowdown,clocks_throttle_reasons.sw_thermal_slowdown"
)


class CheckResult(NamedTuple):
    """The result of a check.

    Attributes:
        status: PASS; WARN if runs may be slow or unstable; FAIL if runs cannot work.
        message: The observation.
        remedy: What to do; empty for PASS.
    """

    status: Literal["PASS", "WARN", "FAIL"]
    message: str
    remedy: str = ""


class DoctorConfig(RunConfig):
    """The training run that the machine is checked for."""

    prog = "distmp doctor"
    description = "Check whether this machine is ready to train."


def main(argv: Sequence[str] | None = None) -> int:
    """Check this machine and print the results.

    Returns:
        1 if a check failed, else 0.

    Raises:
        ConfigError: If a setting is invalid.
    """
    results = run_checks(DoctorConfig.load(sys.argv[1:] if argv is None else argv))
    sys.stdout.write(f"{_report(results)}\n{_FAILED_RUN}\n")
    return int(any(result.status == "FAIL" for _, result in results))


def run_checks(config: RunConfig) -> list[tuple[str, CheckResult]]:
    """Return the problems of every check by name, or its PASS if there are none."""
    results = []
    for name, check in CHECKS.items():
        outcomes = list(check(config))
        problems = [result for result in outcomes if result.status != "PASS"]
        results += [(name, result) for result in problems or outcomes]
    return results


def _report(results: Sequence[tuple[str, CheckResult]]) -> str:
    """Return a line for each result, and one for its remedy if any."""
    rows: list[tuple[str, ...]] = []
    for name, result in results:
        rows.append((result.status, name, result.message))
        if result.remedy:
            rows.append(("", "", f"-> {result.remedy}"))
    return "\n".join(text_table(rows))


def _versions(config: RunConfig) -> Iterator[CheckResult]:
    message = ", ".join(f"{name} {version or 'none'}" for name, version in versions().items())
    yield CheckResult("PASS", message)


def _cuda(config: RunConfig) -> Iterator[CheckResult]:
    import torch

    if not _gpu_rows() and not torch.cuda.is_available():
        yield CheckResult("PASS", "no GPU; runs use the CPU")
        return
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        yield CheckResult(
            "FAIL",
            f"torch {torch.__version__} cannot use the GPUs: {error}",
            "install a torch for a CUDA version that the driver supports, or a newer driver; check "
            "CUDA_VISIBLE_DEVICES, and whether this container has access to GPUs",
        )
    else:
        message = f"{torch.cuda.device_count()} devices; torch for CUDA {torch.version.cuda}"
        yield CheckResult("PASS", message)


def _gpus(config: RunConfig) -> Iterator[CheckResult]:
    rows = _gpu_rows()
    for index, (model, memory, used, errors, *slowdowns) in enumerate(rows):
        name = f"GPU {index}, {model}"
        if errors.isdecimal() and int(errors):
            remedy = "drain the machine and reset the GPU; replace it if they come back"
            message = f"{name}: {errors} memory errors that were not corrected"
            yield CheckResult("FAIL", message, remedy)
        if "Active" in slowdowns:
            remedy = "check `nvidia-smi -q -d PERFORMANCE,TEMPERATURE` and the cooling"
            message = f"{name}: throttled because of temperature or power"
            yield CheckResult("WARN", message, remedy)
        if used.isdecimal() and int(used) > _BUSY_GPU_SHARE * int(memory):
            message = f"{name}: {used} MiB of its memory is in use"
            yield CheckResult("WARN", message, "see `nvidia-smi` for the processes that use it")
    yield CheckResult("PASS", ", ".join(row[0] for row in rows) or "none")


def _shared_memory(config: RunConfig) -> Iterator[CheckResult]:
    users = ["data workers"] if config.data.workers else []
    users += ["NCCL"] if len(_gpu_rows()) > 1 else []
    mount = "`docker run --shm-size=16g`; in Kubernetes an emptyDir with medium: Memory"
    if not users:
        yield CheckResult("PASS", "not needed without data workers and with up to one GPU")
    elif not os.path.isdir("/dev/shm"):
        used = f"through which {' and '.join(users)} exchange data"
        yield CheckResult("FAIL", f"/dev/shm is missing, {used}", f"mount a tmpfs there: {mount}")
    else:
        size, _, free = shutil.disk_usage("/dev/shm")
        message = f"/dev/shm has {bytes_text(free)} free of {bytes_text(size)}"
        if free < _LITTLE_SHM_BYTES:
            remedy = f"{mount}; remove files of ended processes (`ls -l /dev/shm`)"
            yield CheckResult("WARN", f"{message}; {' and '.join(users)} may fill it", remedy)
        yield CheckResult("PASS", message)


def _limits(config: RunConfig) -> Iterator[CheckResult]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        remedy = "`ulimit -n 65536` before the launch"
        yield CheckResult("WARN", f"at most {files} open files", remedy)
    if locked != resource.RLIM_INFINITY and (devices := _rdma_devices()):
        yield CheckResult(
            "FAIL",
            f"at most {bytes_text(locked)} of locked memory, but {', '.join(devices)} has to lock "
            "its buffers",
            "`ulimit -l unlimited`, or `docker run --ulimit memlock=-1`",
        )
    yield CheckResult("PASS", "open files and locked memory suffice")


def _disk(config: RunConfig) -> Iterator[CheckResult]:
    """Write a file to `run_dir`, or its nearest existing parent; check the free space."""
    remedy = "free space for checkpoints, or use another run_dir"
    path = Path(config.run_dir).absolute()
    # A path below a file, and one that this user may not see, exist only for `lexists`.
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".distmp-doctor-") as file:
            file.write(os.urandom(_WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(path).free
    except OSError as error:
        yield CheckResult("FAIL", f"{path}: cannot be written ({error.strerror})", remedy)
        return
    message = f"{path}: {bytes_text(free)} free"
    if free < _LITTLE_DISK_BYTES:
        yield CheckResult("FAIL" if free < _NO_DISK_BYTES else "WARN", message, remedy)
    yield CheckResult("PASS", f"{message}, writing a file succeeded")


def _environment(config: RunConfig) -> Iterator[CheckResult]:
    for name, effect in _SLOW.items():
        if os.environ.get(name, "").lower() not in _OFF:
            yield CheckResult("WARN", f"{name}={os.environ[name]} {effect}", f"unset {name}")
    for name in _NO_ERROR_HANDLING:
        if os.environ.get(name) == "0":
            message = f"{name}=0: ranks wait without a limit when one dies"
            yield CheckResult("FAIL", message, f"unset {name}")
    if ranks := [name for name in VARIABLES if name in os.environ]:
        message = f"{', '.join(ranks)} is set: a process started here becomes a rank of a run"
        yield CheckResult("WARN", message, "unset it, unless this process is a rank")
    network = [name for name in sorted(os.environ) if name.startswith(("NCCL_", "GLOO_"))]
    yield CheckResult("PASS", f"network variables: {', '.join(network) or 'none'}")


# The checks by name, in the order of the output.
CHECKS: dict[str, Callable[[RunConfig], Iterator[CheckResult]]] = {
    "versions": _versions,
    "CUDA": _cuda,
    "GPUs": _gpus,
    "shared memory": _shared_memory,
    "limits": _limits,
    "disk": _disk,
    "environment": _environment,
}


def _gpu_rows() -> list[list[str]]:
    """Return what nvidia-smi reports for each GPU; empty without any."""
    options = (f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits")
    table = output_of("nvidia-smi", *options, seconds=_COMMAND_SECONDS) or ""
    rows = csv.reader(table.splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == len(_GPU_QUERY.split(","))]  # not of a warning


def _rdma_devices() -> list[str]:
    """Return the names of InfiniBand and RoCE devices."""
    return sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
