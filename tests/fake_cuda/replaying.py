"""Runs a block with late operations, and replays them in other orders.

FAKE_CUDA_SCHEDULES sets the number of orders, 200 by default; `none` disables replays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tests.fake_cuda import device


class OrderError(AssertionError):
    """A race: values depend on an order that streams, events and waits do not determine."""


@contextlib.contextmanager
def replayed() -> Iterator[None]:
    """Run the block with every operation as late as possible, then replay it in other orders.

    Raises:
        OrderError: If a replay gives another value.
    """
    device.set_schedule(seed=1)
    schedules = os.environ.get("FAKE_CUDA_SCHEDULES", "200")
    if schedules == "none":
        yield
        return
    with device.recording(lambda recorded: _check(recorded, int(schedules))):
        yield


def _check(recorded: device.Recording, schedules: int) -> None:
    for seed in range(schedules + 1):
        if difference := recorded.replay(seed):
            raise OrderError(
                f"in another order of the {len(recorded)} operations (schedule {seed}), "
                f"{difference}; a stream does not wait for an operation that it depends on"
            )
