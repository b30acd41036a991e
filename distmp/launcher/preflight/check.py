"""Run the preflight: compare the ranks, connect them, and measure their speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from distmp.config import RunConfig
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.world import World, join, local_device
from distmp.launcher.preflight.comparison import RankIdentity, compare
from distmp.launcher.preflight.speed import (
    RankSpeed,
    measure_links,
    measure_product,
    slow_links,
    slow_ranks,
    stride,
)
from distmp.launcher.preflight.store import PreflightStore
from distmp.utils.units import bytes_text

# Time without progress of any rank after which the preflight ends the job.
LIMIT_SECONDS = 50.0


@dataclass(frozen=True)
class PreflightReport:
    """The result of a successful preflight.

    Attributes:
        summary: The measured speeds in one line.
        warnings: One line per slow rank or differing variable, with ranks and machines.
    """

    summary: str
    warnings: list[str] = field(default_factory=list)


def is_enabled(config: RunConfig, environment: RankEnvironment) -> bool:
    """Whether a run starts with a preflight; "auto" runs it on more than one machine."""
    if config.preflight == "auto":
        return environment.world_size > environment.local_world_size
    return config.preflight == "always" and environment.world_size > 1


def join_checked(
    config: RunConfig, environment: RankEnvironment, limit_seconds: float = LIMIT_SECONDS
) -> tuple[World, PreflightReport]:
    """Create the process group like `join`, with a preflight; every rank must call it.

    It takes a few seconds without problems. After `limit_seconds` in which no rank has made
    progress, or after `timeout_minutes` of the configuration, the process exits with code 1, and
    one rank reports which ranks are late.

    Returns:
        The process group and the report, which is the same on every rank.

    Raises:
        PreflightError: If this rank does not reach the store.
        SetupError: On every rank, if versions, settings, code or data differ, or if machines do not
            share the folder of the checkpoints; names ranks, and settings or files.
    """
    started = time.monotonic()
    timeout_seconds = 60 * config.timeout_minutes
    store = PreflightStore(environment, limit_seconds, max(limit_seconds, timeout_seconds))
    with store.watched():
        store.connect()
        store.check_large_messages()
        store.enter("comparing settings, code and data", alone=True)
        warnings, identities = compare(store, config)
        # Before NCCL starts: a rank that compiles kernels here does not keep others in native code.
        store.enter("multiplying matrices", alone=True)
        product = measure_product(local_device(environment.local_rank))
        store.enter("connecting to the other ranks")
        world = join(environment, timeout_seconds=timeout_seconds)
        local_sizes = [identity.local_world_size for identity in identities]
        links = measure_links(store, world, stride(local_sizes))
        products = world.ranks.gather(product)
        store.clear()
    speeds = [RankSpeed(product, *pair) for product, pair in zip(products, links, strict=True)]
    names = [f"rank {rank} on {identity.host}" for rank, identity in enumerate(identities)]
    summary = _summary(speeds, identities, time.monotonic() - started)
    warnings += [*slow_ranks(speeds, names), *slow_links(speeds, world.device.type)]
    return world, PreflightReport(summary, warnings)


def _summary(
    speeds: Sequence[RankSpeed], identities: Sequence[RankIdentity], seconds: float
) -> str:
    hosts = len({identity.host for identity in identities})
    products = [1000 * speed.product for speed in speeds]
    links = [speed.link.rate for speed in speeds if speed.link.rate]
    parts = [
        f"{len(speeds)} ranks on {hosts} host{'s' if hosts > 1 else ''}, consistent",
        f"matrix product {min(products):.3g} to {max(products):.3g} ms",
        f"all-reduce {bytes_text(min(speed.all_reduce.rate for speed in speeds))}/s",
    ]
    if links:
        parts.append(f"links {bytes_text(min(links))}/s to {bytes_text(max(links))}/s")
    return f"{'; '.join(parts)}; {seconds:.1f} s"
