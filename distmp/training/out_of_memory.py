"""Explains an out-of-memory error: the memory in use, and the settings that need less."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psutil
import torch

from distmp.config import RunConfig
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.utils.cgroups import memory_limit
from distmp.utils.out_of_memory import is_out_of_memory
from distmp.utils.units import bytes_text

_REQUESTED = (
    re.compile(r"[Tt]ried to allocate (?P<number>[\d.]+) (?P<unit>[KMGTP]?i?B|bytes)"),
    re.compile(r"Unable to allocate (?P<number>[\d.]+) (?P<unit>[KMGTP]?i?B|bytes)"),  # numpy
)
_UNITS = {"B": 1, "bytes": 1} | {f"{k}iB": 2 ** (10 * i) for i, k in enumerate("KMGTP", 1)}
# Report fragmentation if this share of the reserved memory is unused.
_FRAGMENTED = 0.1


def advice(
    error: BaseException, config: RunConfig | None, world_size: int, phase: str
) -> str | None:
    """Return a message that replaces the traceback of an out-of-memory error.

    Args:
        error: Any error.
        config: The configuration; None if it was not loaded.
        world_size: Number of ranks.
        phase: What the rank was doing, as text.

    Returns:
        How much was requested, how much is in use, and which settings need less; None for other
        errors.
    """
    if not is_out_of_memory(error):
        return None
    on_gpu = torch.cuda.is_available() and re.search("cuda|cublas", str(error), re.I) is not None
    lines = [f"ran out of {'GPU' if on_gpu else 'main'} memory in {phase}"]
    requested = _requested_bytes(str(error))
    lines[0] += f": {bytes_text(requested)} more were requested" if requested else ""
    lines.append(f"  in use: {_gpu_usage() if on_gpu else _host_usage()}")
    changes = list(_changes(config, world_size, on_gpu)) if config is not None else []
    lines += [f"  - {change}" for change in changes]
    lines.append(
        "  `distmp explain` with the options of this run predicts the memory, before and after a "
        "change"
    )
    return "\n".join(lines)


def _requested_bytes(message: str) -> float | None:
    """Return the size of the allocation that failed, in bytes."""
    for pattern in _REQUESTED:
        if match := pattern.search(message):
            return float(match["number"]) * _UNITS.get(match["unit"], 1)
    return None


def _gpu_usage() -> str:
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    usage = (
        f"{bytes_text(allocated)} by tensors of this rank, {bytes_text(reserved)} reserved for "
        f"them; {bytes_text(free)} of {bytes_text(total)} are free"
    )
    if reserved - allocated > _FRAGMENTED * reserved:
        usage += (
            f"; {bytes_text(reserved - allocated)} are reserved but fragmented: setting the "
            "environment variable PYTORCH_ALLOC_CONF=expandable_segments:True may be enough"
        )
    return usage


def _host_usage() -> str:
    machine = psutil.virtual_memory()
    usage = (
        f"{bytes_text(psutil.Process().memory_info().rss)} by this rank; "
        f"{bytes_text(machine.available)} of {bytes_text(machine.total)} are free on this machine"
    )
    limit = memory_limit()
    if limit is not None and limit < machine.total:
        usage += f", and the limit of this job is {bytes_text(limit)}"
    return usage


def _changes(config: RunConfig, world_size: int, on_gpu: bool) -> Iterator[str]:
    """Yield changes that need less memory and give the same result, the cheapest first."""
    size = config.batch.microbatch_size
    if smaller := _largest_proper_divisor(size):
        yield (
            f"batch.microbatch_size = {smaller} instead of {size}: the same global batch of "
            f"{config.batch.global_batch_size} in {size // smaller} times as many microbatches"
        )
    if (value := config.activation_checkpointing) != "blocks":
        yield f"activation_checkpointing = blocks instead of {value}: takes up to a third more time"
    sharded = config.strategy in SHARDED_STRATEGIES
    if world_size > 1 and not sharded:
        # The run prints what `auto` selected; the configuration does not have it.
        condition = ", if auto selected ddp" if config.strategy == "auto" else ""
        if not config.shard_optimizer:
            yield (
                f"shard_optimizer = true{condition}: shards FP32 weights and optimizer state over "
                f"{world_size} ranks"
            )
        yield (
            f"strategy = fsdp instead of {config.strategy}{condition}: also shards weights and "
            f"gradients over {world_size} ranks"
        )
    if on_gpu and config.precision.policy in ("fp32", "tf32"):
        yield f"precision.policy = bf16 instead of {config.precision.policy}"
    if config.precision.on_nonfinite == "drop_microbatch":
        yield "precision.on_nonfinite = skip_step: 4 bytes less per parameter"
    yield f"more ranks than {world_size}, or a smaller model"


def _largest_proper_divisor(number: int) -> int | None:
    return next((d for d in range(number // 2, 0, -1) if number % d == 0), None)
