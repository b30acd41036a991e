"""How fast each rank is, alone and with its neighbours, so that slow ones can be named."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.world import World
from distmp.launcher.preflight.store import PreflightStore

# How many times slower than the median of the others is worth a word.
SLOW_PRODUCT = 1.5
SLOW_LINK = 2.0

# What is multiplied and what is sent; a fraction of a second of either.
_MATRIX = {"cpu": 512, "cuda": 4096}
SENT_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_REPETITIONS = 10
# The best of a few times counts, and a busy processor is not busy for so long.
_PRODUCT_SECONDS = 0.2


class RankSpeed(NamedTuple):
    """How fast a rank was; times in seconds.

    Attributes:
        product: Of a matrix product.
        link: Of an exchange with the better of its two neighbours; 0.0 without neighbours.
        all_reduce: Of an all-reduce over all ranks, the same on all of them.
    """

    product: float
    link: float
    all_reduce: float


def measure_speed(meeting: PreflightStore, world: World, stride: int) -> list[RankSpeed]:
    """Return how fast every rank is; all ranks get the same list."""
    device = world.device
    meeting.enter("multiply matrices")
    side = _MATRIX[device.type]
    matrix = torch.ones(side, side, device=device)
    product, until = math.inf, time.monotonic() + _PRODUCT_SECONDS
    while time.monotonic() < until or product == math.inf:
        product = min(product, _best_time(lambda: torch.mm(matrix, matrix), device))
    sent = torch.ones(SENT_BYTES[device.type] // 4, device=device)
    meeting.enter("exchange data with its neighbours")
    links = [
        _best_time(lambda partner=partner: _exchange(sent, partner), device)  # type: ignore[misc]
        for partner in _in_step(partners(world.rank, world.world_size, stride), world)
    ]
    meeting.enter("add up data over all ranks")
    all_reduce = _best_time(lambda: dist.all_reduce(sent), device)
    mine = RankSpeed(product, min(links, default=0.0), all_reduce)
    everyone: list[Any] = [None] * world.world_size
    dist.all_gather_object(everyone, tuple(mine), group=world.group)
    return [RankSpeed(*numbers) for numbers in everyone]


def stride(local_sizes: Sequence[int]) -> int:
    """Return how far apart the ranks are that exchange data: on neighbouring machines.

    Args:
        local_sizes: For each rank, how many ranks its machine has.
    """
    alike = len(set(local_sizes)) == 1 and len(local_sizes) % local_sizes[0] == 0
    return local_sizes[0] if alike and local_sizes[0] < len(local_sizes) else 1


def partners(rank: int, world_size: int, stride: int) -> list[int | None]:
    """Return with whom a rank exchanges data in each round; None: it rests.

    Ranks that are `stride` apart form a ring, and everybody exchanges with both neighbours: one
    that is slow with both is slow itself.
    """
    count = world_size // stride
    place, lane = divmod(rank, stride)
    found: list[int | None] = []
    for pairs in _rounds(count):
        partner = pairs.get(place)
        found.append(None if partner is None else partner * stride + lane)
    return found


def _rounds(count: int) -> Iterator[dict[int, int]]:
    """Give who meets whom on a ring of so many places, as few rounds as there can be."""
    even = [(place, place + 1) for place in range(0, count - 1, 2)]
    odd = [(place, (place + 1) % count) for place in range(1, count - count % 2, 2)]
    closing = [(count - 1, 0)] if count % 2 and count > 1 else []
    for pairs in (even, odd if count > 2 else [], closing):
        if pairs:
            yield {a: b for pair in pairs for a, b in (pair, pair[::-1])}


def _in_step(rounds: Sequence[int | None], world: World) -> Iterator[int]:
    """Give the partners; each round begins at the same time on all ranks."""
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
    """Return the shortest of a few times, the one that other processes disturbed least."""
    times = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


def slow_ranks(measured: Sequence[RankSpeed], hosts: Sequence[str]) -> list[str]:
    """Name the ranks that are far slower than the median of the others.

    Args:
        measured: Of all ranks.
        hosts: What each is called.
    """
    told = []
    for rank, numbers in enumerate(measured):
        others = [*measured[:rank], *measured[rank + 1 :]]
        for what, mine, theirs, limit in (
            ("a matrix product", numbers.product, [o.product for o in others], SLOW_PRODUCT),
            ("an exchange of data", numbers.link, [o.link for o in others if o.link], SLOW_LINK),
        ):
            middle = statistics.median(theirs) if theirs else 0.0
            if middle and mine > limit * middle:
                told.append(
                    f"{hosts[rank]} is slow: {what} takes {1000 * mine:.3g} ms, "
                    f"{mine / middle:.1f} x the median of the others"
                )
    return told
