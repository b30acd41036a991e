"""What to change in a configuration that does not fit into memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psutil
import torch

from distmp.config import RunConfig
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.utils.cgroups import memory_limit
from distmp.utils.units import bytes_text

# What says so where the error is no class of its own: torch's allocator of the host, cuBLAS, NCCL
# and the driver.
_SIGNS = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "cudaErrorMemoryAllocation",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)
_ASKED = (
    re.compile(r"[Tt]ried to allocate (?P<number>[\d.]+) (?P<unit>[KMGTP]?i?B|bytes)"),
    re.compile(r"Unable to allocate (?P<number>[\d.]+) (?P<unit>[KMGTP]?i?B|bytes)"),  # numpy
)
_UNITS = {"B": 1, "bytes": 1} | {f"{k}iB": 2 ** (10 * i) for i, k in enumerate("KMGTP", 1)}
# Reserved and unused memory is worth a hint above this share of what is reserved.
_FRAGMENTED = 0.1


def advice(
    error: BaseException, config: RunConfig | None, world_size: int, doing: str
) -> str | None:
    """Return what to say about an error in place of its traceback, if memory ran out.

    Args:
        error: Of any kind.
        config: The configuration of the run, if it was read.
        world_size: Number of ranks.
        doing: What the rank was doing, in words.

    Returns:
        How much was asked for, what is held, and which settings take less; None for other errors.
    """
    if not is_out_of_memory(error):
        return None
    on_gpu = torch.cuda.is_available() and re.search("cuda|cublas", str(error), re.I) is not None
    lines = [f"ran out of {'GPU' if on_gpu else 'main'} memory in {doing}"]
    asked = _asked(str(error))
    lines[0] += f": {bytes_text(asked)} more were asked for" if asked else ""
    lines.append(f"  held: {_held_on_gpu() if on_gpu else _held_on_host()}")
    ways = list(_ways(config, world_size, on_gpu)) if config is not None else []
    lines += [f"  - {way}" for way in ways]
    lines.append(
        "  `distmp explain`, with the options of this run, says what takes how much of it, before "
        "and after a change"
    )
    return "\n".join(lines)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, of whichever kind."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def _asked(message: str) -> float | None:
    """Return the bytes that an allocator was asked for."""
    for pattern in _ASKED:
        if found := pattern.search(message):
            return float(found["number"]) * _UNITS.get(found["unit"], 1)
    return None


def _held_on_gpu() -> str:
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    told = (
        f"{bytes_text(allocated)} by tensors of this rank, {bytes_text(reserved)} reserved for "
        f"them; {bytes_text(free)} of {bytes_text(total)} are free"
    )
    if reserved - allocated > _FRAGMENTED * reserved:
        told += (
            f"; {bytes_text(reserved - allocated)} lie unused in pieces: the environment variable "
            "PYTORCH_ALLOC_CONF=expandable_segments:True may be enough"
        )
    return told


def _held_on_host() -> str:
    machine = psutil.virtual_memory()
    told = (
        f"{bytes_text(psutil.Process().memory_info().rss)} by this rank; "
        f"{bytes_text(machine.available)} of {bytes_text(machine.total)} are free on this machine"
    )
    limit = memory_limit()
    if limit is not None and limit < machine.total:
        told += f", and {bytes_text(limit)} are allowed to this job"
    return told


def _ways(config: RunConfig, world_size: int, on_gpu: bool) -> Iterator[str]:
    """Yield settings that take less memory and leave the result as it is, the cheapest first."""
    size = config.batch.microbatch_size
    if smaller := _largest_proper_divisor(size):
        yield (
            f"batch.microbatch_size = {smaller} instead of {size}: the same global batch of "
            f"{config.batch.global_batch_size} in {size // smaller} times as many microbatches"
        )
    if config.activation_checkpointing == "none":
        yield "activation_checkpointing = blocks instead of none: about a third more time"
    sharded = config.strategy in SHARDED_STRATEGIES
    if world_size > 1 and not sharded:
        if not config.shard_optimizer:
            yield (
                "shard_optimizer = true: FP32 weights and optimizer state divided over "
                f"{world_size} ranks"
            )
        yield (
            f"strategy = fsdp instead of {config.strategy}: weights and gradients divided over "
            f"{world_size} ranks as well"
        )
    if sharded and not config.sharding.offload and on_gpu:
        yield "sharding.offload = true: weights and optimizer state in main memory, and slower"
    if on_gpu and config.precision.policy in ("fp32", "tf32"):
        yield f"precision.policy = bf16 instead of {config.precision.policy}"
    if config.precision.on_nonfinite == "drop_microbatch":
        yield "precision.on_nonfinite = skip_step: 4 bytes less for each parameter"
    yield f"more ranks than {world_size}, or a smaller model"


def _largest_proper_divisor(number: int) -> int | None:
    return next((d for d in range(number // 2, 0, -1) if number % d == 0), None)
