"""Measure the speed of each rank's links to its neighbors, to report slow ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.world import World
from distmp.utils.units import bytes_text

# A rank is reported if its link is slower than the median of the others by this factor.
SLOW_LINK = 2.0

# A slow link carries these messages in a few seconds.
_MESSAGE_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
_REPETITIONS = 3


class RankSpeed(NamedTuple):
    """Measured speeds of a rank.

    Attributes:
        link: Bytes per second of an exchange with the faster of its two neighbors; 0.0 without one.
        all_reduce: Bytes per second of an all-reduce over all ranks.
    """

    link: float
    all_reduce: float


def measure(world: World, stride: int) -> RankSpeed:
    """Measure the links of this rank; every rank calls it."""
    rates = [0.0]
    for partner in partners(world.rank, world.world_size, stride):
        rate = _rate(partial(_exchange, partner=partner), world.device)
        rates.append(0.0 if partner is None else rate)
    return RankSpeed(max(rates), _rate(dist.all_reduce, world.device))


def _rate(send: Callable[[Tensor], object], device: torch.device) -> float:
    """Return the bytes per second of the fastest of several messages."""
    send(torch.zeros(1, device=device))  # opens connections
    size = _MESSAGE_BYTES[device.type]
    message = torch.ones(size // 4, device=device)
    return size / min(_time(partial(send, message), device) for _ in range(_REPETITIONS))


def stride(local_sizes: Sequence[int]) -> int:
    """Return the distance between ranks that exchange data, so that they are on different machines.

    Args:
        local_sizes: For each rank, the number of ranks on its machine.
    """
    uniform = len(set(local_sizes)) == 1 and len(local_sizes) % local_sizes[0] == 0
    return local_sizes[0] if uniform and local_sizes[0] < len(local_sizes) else 1


def partners(rank: int, world_size: int, stride: int) -> list[int | None]:
    """Return a rank's partner in each round, or None if it is idle in that round.

    Ranks that are `stride` apart form a ring in which each exchanges data with both neighbors: a
    rank that is slow with both is slow itself.
    """
    count = world_size // stride
    position, lane = divmod(rank, stride)
    pairs = [(a, (a + 1) % count) for a in range(count if count > 2 else count - 1)]
    # The last pair of an odd ring shares a rank with the first.
    even = count - count % 2
    rounds = filter(None, (pairs[:even:2], pairs[1:even:2], pairs[even:]))
    other = [{a: b for pair in own for a, b in (pair, pair[::-1])} for own in rounds]
    return [own[position] * stride + lane if position in own else None for own in other]


def _exchange(sent: Tensor, partner: int | None) -> None:
    """Send a tensor to a partner and receive one from it."""
    if partner is None:
        return
    operations = [
        dist.P2POp(dist.isend, sent, partner),
        dist.P2POp(dist.irecv, torch.empty_like(sent), partner),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _time(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def slow_ranks(speeds: Sequence[RankSpeed], names: Sequence[str]) -> list[str]:
    """Return a line for each rank whose link is far slower than the median of the others.

    Args:
        speeds: Measured speeds of all ranks.
        names: Names of all ranks.
    """
    lines = []
    for rank, speed in enumerate(speeds):
        others = [other.link for other in (*speeds[:rank], *speeds[rank + 1 :]) if other.link]
        rate = statistics.median(others or [0.0])
        if speed.link and rate > SLOW_LINK * speed.link:
            lines.append(
                f"{names[rank]} is slow: an exchange of data runs at {bytes_text(speed.link)}/s, "
                f"{rate / speed.link:.1f} x slower than the median of the others"
            )
    return lines
