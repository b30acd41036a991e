"""Measure the speed of each rank, alone and with its neighbors, to report slow ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.distributed.world import World
from distmp.utils.units import bytes_text

# A rank is reported if its product takes this many times the median of the others, or if its link
# is slower than the median of the others by this factor.
SLOW_PRODUCT = 1.5
SLOW_LINK = 2.0

_MATRIX = {"cpu": 512, "cuda": 4096}
# The shortest time counts; a processor is rarely busy for so long.
_PRODUCT_SECONDS = 0.2

# Messages grow up to the largest size, as long as one takes less than a quarter of a second.
_SMALLEST_BYTES = 4096
LARGEST_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
_GROWTH = 4
_MESSAGE_SECONDS = 0.25
_REPETITIONS = 10


class RankSpeed(NamedTuple):
    """Measured speeds of a rank.

    Attributes:
        product: Time of a matrix product in seconds.
        link: Bytes per second of an exchange with the faster of its two neighbors; 0.0 without one.
        all_reduce: Bytes per second of an all-reduce over all ranks.
        complete: Whether the links carried the largest message.
    """

    product: float
    link: float
    all_reduce: float
    complete: bool


def measure_product(device: torch.device) -> float:
    """Return the time of a matrix product in seconds."""
    side = _MATRIX[device.type]
    matrix = torch.ones(side, side, device=device)
    until = time.monotonic() + _PRODUCT_SECONDS
    times = [_time(lambda: torch.mm(matrix, matrix), device)]
    while time.monotonic() < until:
        times.append(_time(lambda: torch.mm(matrix, matrix), device))
    return min(times)


def measure_links(world: World, stride: int) -> tuple[float, float, bool]:
    """Return the fields `link`, `all_reduce` and `complete` of this rank's `RankSpeed`.

    It takes a few seconds at most: links that are slower are measured with smaller messages.
    """
    measured = [(0.0, True)]
    for partner in partners(world.rank, world.world_size, stride):
        rate, complete = _measure(
            lambda message, partner=partner: _exchange(message, partner),  # type: ignore[misc]
            world.device,
        )
        measured.append((0.0 if partner is None else rate, complete))
    all_reduce, complete = _measure(dist.all_reduce, world.device)
    link = max(rate for rate, _ in measured)
    return link, all_reduce, complete and all(complete for _, complete in measured)


def _measure(send: Callable[[Tensor], object], device: torch.device) -> tuple[float, bool]:
    """Send messages of growing sizes, then of the largest one again, as long as time is left.

    All ranks send the same sizes, which follow the slowest rank.

    Returns:
        Bytes per second of this rank, and whether the largest message was sent.
    """
    send(torch.zeros(1, device=device))  # opens connections
    size = _SMALLEST_BYTES
    while True:
        message = torch.ones(size // 4, device=device)
        slowest = torch.tensor([_time(lambda: send(message), device)], device=device)  # noqa: B023
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds = float(slowest)
        if size == LARGEST_BYTES[device.type] or seconds > _MESSAGE_SECONDS:
            break
        size *= _GROWTH
    repetitions = range(min(_REPETITIONS, 1 + int(_MESSAGE_SECONDS / seconds)))
    best = min(_time(lambda: send(message), device) for _ in repetitions)
    return size / best, size == LARGEST_BYTES[device.type]


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
        rate = _median(other.link for other in others if other.link)
        if speed.link and rate > SLOW_LINK * speed.link:
            lines.append(
                f"{names[rank]} is slow: an exchange of data runs at {bytes_text(speed.link)}/s, "
                f"{rate / speed.link:.1f} x slower than the median of the others"
            )
    return lines


def slow_links(speeds: Sequence[RankSpeed], device: str) -> list[str]:
    """Return a line if links did not carry the largest message in time."""
    slow = [speed for speed in speeds if not speed.complete]
    if not slow:
        return []
    rate = min(min(filter(None, (speed.link, speed.all_reduce))) for speed in slow)
    seconds = LARGEST_BYTES[device] / rate
    return [
        f"the network is slow: {bytes_text(rate)}/s, so a message of "
        f"{bytes_text(LARGEST_BYTES[device])} takes {seconds:.2g} s. Training works, but every "
        "step waits for its gradients"
    ]


def _median(values: Iterable[float]) -> float:
    return statistics.median([*values] or [0.0])
