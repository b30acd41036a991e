"""Measure the speed of each rank, alone and with its neighbors, to report slow ranks."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.world import World
from distmp.launcher.preflight.store import PreflightStore

# A rank is reported if it takes this many times the median of the others.
SLOW_PRODUCT = 1.5
SLOW_LINK = 2.0

# Sizes of the matrices and messages; each measurement takes a fraction of a second.
_MATRIX = {"cpu": 512, "cuda": 4096}
SENT_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_REPETITIONS = 10
# The shortest time counts; a processor is rarely busy for so long.
_PRODUCT_SECONDS = 0.2


class RankSpeed(NamedTuple):
    """Measured times of a rank, in seconds.

    Attributes:
        product: Time of a matrix product.
        link: Time of an exchange with the faster of its two neighbors; 0.0 without neighbors.
        all_reduce: Time of an all-reduce over all ranks.
    """

    product: float
    link: float
    all_reduce: float


def measure_speed(store: PreflightStore, world: World, stride: int) -> list[RankSpeed]:
    """Return the measured times of every rank; all ranks return the same list."""
    device = world.device
    store.enter("multiplying matrices")
    side = _MATRIX[device.type]
    matrix = torch.ones(side, side, device=device)
    product, until = math.inf, time.monotonic() + _PRODUCT_SECONDS
    while time.monotonic() < until or product == math.inf:
        product = min(product, _best_time(lambda: torch.mm(matrix, matrix), device))
    sent = torch.ones(SENT_BYTES[device.type] // 4, device=device)
    store.enter("exchanging data with its neighbors")
    links = [
        _best_time(lambda partner=partner: _exchange(sent, partner), device)  # type: ignore[misc]
        for partner in _synchronized(partners(world.rank, world.world_size, stride), world)
    ]
    store.enter("reducing data over all ranks")
    all_reduce = _best_time(lambda: dist.all_reduce(sent), device)
    return world.ranks.gather(RankSpeed(product, min(links, default=0.0), all_reduce))


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
    result: list[int | None] = []
    for pairs in _rounds(count):
        partner = pairs.get(position)
        result.append(None if partner is None else partner * stride + lane)
    return result


def _rounds(count: int) -> Iterator[dict[int, int]]:
    """Yield the pairs of each round on a ring of `count` positions, with the fewest rounds."""
    even = [(position, position + 1) for position in range(0, count - 1, 2)]
    odd = [(position, (position + 1) % count) for position in range(1, count - count % 2, 2)]
    closing = [(count - 1, 0)] if count % 2 and count > 1 else []
    for pairs in (even, odd if count > 2 else [], closing):
        if pairs:
            yield {a: b for pair in pairs for a, b in (pair, pair[::-1])}


def _synchronized(rounds: Sequence[int | None], world: World) -> Iterator[int]:
    """Yield the partners, with a barrier before each round."""
    for partner in rounds:
        dist.barrier(group=world.group)
        if partner is not None:
            yield partner


def _exchange(sent: Tensor, partner: int) -> None:
    received = torch.empty_like(sent)
    operations = [
        dist.P2POp(dist.isend, sent, partner),
        dist.P2POp(dist.irecv, received, partner),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _best_time(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of several times, the one least disturbed by other processes."""
    times = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


def slow_ranks(speeds: Sequence[RankSpeed], names: Sequence[str]) -> list[str]:
    """Return a line for each rank that is far slower than the median of the others.

    Args:
        speeds: Measured times of all ranks.
        names: Names of all ranks.
    """
    lines = []
    for rank, speed in enumerate(speeds):
        others = [*speeds[:rank], *speeds[rank + 1 :]]
        for what, own, theirs, limit in (
            ("a matrix product", speed.product, [o.product for o in others], SLOW_PRODUCT),
            ("an exchange of data", speed.link, [o.link for o in others if o.link], SLOW_LINK),
        ):
            median = statistics.median(theirs) if theirs else 0.0
            if median and own > limit * median:
                lines.append(
                    f"{names[rank]} is slow: {what} takes {1000 * own:.3g} ms, "
                    f"{own / median:.1f} x the median of the others"
                )
    return lines
