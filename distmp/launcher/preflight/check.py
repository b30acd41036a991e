"""Run the preflight: compare the ranks, connect them, and measure their speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from distmp.config import RunConfig
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.world import World, join
from distmp.launcher.preflight.comparison import RankIdentity, compare
from distmp.launcher.preflight.speed import SENT_BYTES, RankSpeed, measure_speed, slow_ranks, stride
from distmp.launcher.preflight.store import PreflightStore
from distmp.utils.units import bytes_text

# Time limit of the full preflight, from its start on a rank.
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

    It takes one or two seconds without problems. After `limit_seconds` the process exits with code
    1, and one rank reports which ranks are late.

    Returns:
        The process group and the report, which is the same on every rank.

    Raises:
        PreflightError: If this rank does not reach the store.
        SetupError: On every rank, if versions or configurations differ; names ranks and settings.
    """
    started = time.monotonic()
    store = PreflightStore(environment, limit_seconds)
    with store.watched():
        store.connect()
        store.enter("comparing versions and configurations")
        warnings, identities = compare(store, config)
        store.enter("connecting to the other ranks")
        world = join(environment, timeout_seconds=60 * config.timeout_minutes)
        local_sizes = [identity.local_world_size for identity in identities]
        speeds = measure_speed(store, world, stride(local_sizes))
        store.clear()
    names = [f"rank {rank} on {identity.host}" for rank, identity in enumerate(identities)]
    summary = _summary(speeds, identities, world, time.monotonic() - started)
    return world, PreflightReport(summary, [*warnings, *slow_ranks(speeds, names)])


def _summary(
    speeds: Sequence[RankSpeed], identities: Sequence[RankIdentity], world: World, seconds: float
) -> str:
    size = SENT_BYTES[world.device.type]
    hosts = len({identity.host for identity in identities})
    products = [1000 * speed.product for speed in speeds]
    links = [size / speed.link for speed in speeds if speed.link]
    parts = [
        f"{len(speeds)} ranks on {hosts} host{'s' if hosts > 1 else ''}, consistent",
        f"matrix product {min(products):.3g} to {max(products):.3g} ms",
        f"all-reduce {bytes_text(size / max(speed.all_reduce for speed in speeds))}/s",
    ]
    if links:
        parts.append(f"links {bytes_text(min(links))}/s to {bytes_text(max(links))}/s")
    return f"{'; '.join(parts)}; {seconds:.1f} s"
