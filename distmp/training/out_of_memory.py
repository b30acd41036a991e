"""What to change in a run that ran out of memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psutil
import torch

from distmp.config import RunConfig
from distmp.parallel.settings import SHARDED_STRATEGIES
from distmp.utils.cgroups import memory_limit
from distmp.utils.host_memory import is_out_of_memory
from distmp.utils.units import bytes_text


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
        torch's message, the memory in use, and the settings that need less memory; None for other
        errors.
    """
    if not is_out_of_memory(error):
        return None
    on_gpu = torch.cuda.is_available() and re.search("cuda|cublas", str(error), re.I) is not None
    cause = " ".join(str(error).split()) or type(error).__name__
    lines = [f"ran out of {'GPU' if on_gpu else 'main'} memory in {phase}: {cause}"]
    if not on_gpu:
        lines.append(f"  in use: {_host_usage()}")
    changes = [] if config is None else _changes(config, world_size)
    lines += [f"  - {change}" for change in changes]
    lines.append(
        "  `distmp explain` with the options of this run predicts the memory, before and after a "
        "change"
    )
    return "\n".join(lines)


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


def _changes(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield changes that need less memory and give the same result, the cheapest first."""
    size = config.batch.microbatch_size
    if smaller := next((d for d in range(size // 2, 0, -1) if size % d == 0), None):
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
        yield (
            f"strategy = fsdp instead of {config.strategy}{condition}: shards weights, gradients "
            f"and optimizer state over {world_size} ranks"
        )
    yield f"more ranks than {world_size}, or a smaller model"
