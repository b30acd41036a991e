"""The preflight of a run: compare the ranks, have them meet, measure_speed them."""

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

# All of the preflight, from when a rank begins it.
LIMIT_SECONDS = 50.0


@dataclass(frozen=True)
class PreflightReport:
    """What the preflight found; nothing of it keeps the run from starting.

    Attributes:
        summary: One line of figures.
        warnings: A line for each oddity, naming ranks and machines.
    """

    summary: str
    warnings: list[str] = field(default_factory=list)


def is_wanted(config: RunConfig, environment: RankEnvironment) -> bool:
    """Whether a run begins with a preflight: by itself if there is more than one machine."""
    if config.preflight == "auto":
        return environment.world_size > environment.local_world_size
    return config.preflight == "always" and environment.world_size > 1


def join_checked(
    config: RunConfig, environment: RankEnvironment, limit_seconds: float = LIMIT_SECONDS
) -> tuple[World, PreflightReport]:
    """Meet the other ranks as `join` does, with a preflight around it; every rank has to call it.

    It takes a second or two where all is well, and never longer than `limit_seconds`: then the
    process ends with exit code 1, and one rank says which ranks did not get as far as the others.

    Returns:
        The ranks, and what there is to say about them, the same on every rank.

    Raises:
        PreflightError: If this rank does not reach the store.
        SetupError: On every rank, if versions or configurations differ; names ranks and settings.
    """
    started = time.monotonic()
    meeting = PreflightStore(environment, limit_seconds)
    with meeting.watched():
        meeting.connect()
        meeting.enter("compare versions and configurations")
        warnings, identities = compare(meeting, config)
        meeting.enter("connect to the other ranks")
        world = join(environment, timeout_seconds=60 * config.timeout_minutes)
        measured = measure_speed(
            meeting, world, stride([who.local_world_size for who in identities])
        )
        meeting.forget()
    hosts = [f"rank {rank} on {who.host}" for rank, who in enumerate(identities)]
    summary = _summary(measured, identities, world, time.monotonic() - started)
    return world, PreflightReport(summary, [*warnings, *slow_ranks(measured, hosts)])


def _summary(
    measured: Sequence[RankSpeed], identities: Sequence[RankIdentity], world: World, seconds: float
) -> str:
    size = SENT_BYTES[world.device.type]
    hosts = len({who.host for who in identities})
    products = [1000 * numbers.product for numbers in measured]
    links = [size / numbers.link for numbers in measured if numbers.link]
    told = [
        f"{len(measured)} ranks on {hosts} host{'s' if hosts > 1 else ''}, alike",
        f"matrix product {min(products):.3g} to {max(products):.3g} ms",
        f"all-reduce {bytes_text(size / max(n.all_reduce for n in measured))}/s",
    ]
    if links:
        told.append(f"links {bytes_text(min(links))}/s to {bytes_text(max(links))}/s")
    return f"{'; '.join(told)}; {seconds:.1f} s"
