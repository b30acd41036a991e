"""Measure the speed of each rank, alone and with its neighbors, to report slow ranks."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.world import World
from distmp.launcher.preflight.store import EXCHANGE, PreflightStore
from distmp.utils.units import bytes_text

# A rank is reported if its product takes this many times the median of the others, or if its link
# is slower than the median of the others by this factor.
SLOW_PRODUCT = 1.5
SLOW_LINK = 2.0

_MATRIX = {"cpu": 512, "cuda": 4096}
_REPETITIONS = 10
# The shortest time counts; a processor is rarely busy for so long.
_PRODUCT_SECONDS = 0.2

# Messages grow up to the largest size while time is left: a slow link ends the measurement early.
_SMALLEST_BYTES = 4096
LARGEST_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_GROWTH = 4
# Limit of each measurement, to which the last message is added.
_LINK_SECONDS = 1.0


class LinkSpeed(NamedTuple):
    """Measured speed of messages.

    Attributes:
        rate: Bytes per second in the fastest message of the largest size that was sent; 0.0 if
            none was.
        complete: Whether the largest message was sent.
    """

    rate: float = 0.0
    complete: bool = True


class RankSpeed(NamedTuple):
    """Measured speeds of a rank.

    Attributes:
        product: Time of a matrix product in seconds.
        link: The exchange of data with the faster of its two neighbors.
        all_reduce: An all-reduce over all ranks.
    """

    product: float
    link: LinkSpeed
    all_reduce: LinkSpeed


def measure_product(device: torch.device) -> float:
    """Return the time of a matrix product in seconds."""
    side = _MATRIX[device.type]
    matrix = torch.ones(side, side, device=device)
    product, until = math.inf, time.monotonic() + _PRODUCT_SECONDS
    while time.monotonic() < until or product == math.inf:
        product = min(product, _best_time(lambda: torch.mm(matrix, matrix), device))
    return product


def measure_links(store: PreflightStore, world: World, stride: int) -> list[list[LinkSpeed]]:
    """Return, for each rank, the speeds of its link and of an all-reduce.

    It takes a few seconds at most: links that are slower are measured with smaller messages.
    """
    store.enter(EXCHANGE)
    links = [
        _measure(
            lambda tensor, partner=partner: _exchange(tensor, partner),  # type: ignore[misc]
            lambda seconds, partner=partner: _slower(seconds, partner),  # type: ignore[misc]
            world.device,
        )
        for partner in _synchronized(partners(world.rank, world.world_size, stride), world)
    ]
    store.enter("reducing data over all ranks")
    all_reduce = _measure(dist.all_reduce, _slowest, world.device)
    return world.ranks.gather([max(links, default=LinkSpeed()), all_reduce])


def _measure(
    send: Callable[[Tensor], object],
    agree: Callable[[Tensor], Tensor],
    device: torch.device,
) -> LinkSpeed:
    """Send messages of growing sizes, then of the largest one, as long as time is left.

    Args:
        send: Sends a message together with other ranks.
        agree: Returns the largest of the times of these ranks, so that all stop together.
        device: The device of the messages.
    """
    # The first message opens connections.
    agree(torch.zeros(1, device=device))
    largest = LARGEST_BYTES[device.type]
    size, spent, times = _SMALLEST_BYTES, 0.0, []
    while True:
        message = torch.ones(size // 4, device=device)
        seconds = _time(functools.partial(send, message), device)
        seconds = float(agree(torch.tensor([seconds], device=device)))
        spent += seconds
        times.append(seconds)
        grows = size < largest
        # A message that is four times as large takes less than that, because of the latency.
        if spent + 2 * seconds > _LINK_SECONDS or len(times) == _REPETITIONS:
            return LinkSpeed(size / min(times), not grows)
        if grows:
            size, times = min(size * _GROWTH, largest), []


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


def _exchange(sent: Tensor, partner: int) -> Tensor:
    """Send a tensor to a partner and return the one received from it."""
    received = torch.empty_like(sent)
    operations = [
        dist.P2POp(dist.isend, sent, partner),
        dist.P2POp(dist.irecv, received, partner),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def _slower(seconds: Tensor, partner: int) -> Tensor:
    """Return the larger of this rank's value and its partner's."""
    return torch.maximum(seconds, _exchange(seconds, partner))


def _slowest(seconds: Tensor) -> Tensor:
    """Return the largest value of all ranks."""
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds


def _best_time(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of several times, the one least disturbed by other processes."""
    return min(_time(work, device) for _ in range(_REPETITIONS))


def _time(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def slow_ranks(speeds: Sequence[RankSpeed], names: Sequence[str]) -> list[str]:
    """Return a line for each rank that is far slower than the median of the others.

    Args:
        speeds: Measured speeds of all ranks.
        names: Names of all ranks.
    """
    lines = []
    for rank, speed in enumerate(speeds):
        others = [*speeds[:rank], *speeds[rank + 1 :]]
        product = _median(other.product for other in others)
        if product and speed.product > SLOW_PRODUCT * product:
            lines.append(
                f"{names[rank]} is slow: a matrix product takes {1000 * speed.product:.3g} ms, "
                f"{speed.product / product:.1f} x the median of the others"
            )
        rate = _median(other.link.rate for other in others if other.link.rate)
        if speed.link.rate and rate > SLOW_LINK * speed.link.rate:
            lines.append(
                f"{names[rank]} is slow: an exchange of data runs at "
                f"{bytes_text(speed.link.rate)}/s, {rate / speed.link.rate:.1f} x slower than the "
                "median of the others"
            )
    return lines


def slow_links(speeds: Sequence[RankSpeed], device: str) -> list[str]:
    """Return a line if links did not carry the largest message in time."""
    slow = [speed for speed in speeds if not (speed.link.complete and speed.all_reduce.complete)]
    if not slow:
        return []
    rate = min(min(filter(None, (s.link.rate, s.all_reduce.rate))) for s in slow)
    return [
        f"the network is slow: {bytes_text(rate)}/s, so a message of "
        f"{bytes_text(LARGEST_BYTES[device])} takes more than {_LINK_SECONDS:g} s. Training works, "
        "but every step waits for its gradients"
    ]


def _median(values: Iterable[float]) -> float:
    return statistics.median([*values] or [0.0])
