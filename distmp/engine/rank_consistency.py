"""Compares replicated weights and state between ranks, bit by bit.

Replicas stay equal by induction: equal weights, equal reduced gradients, equal updates. Faulty
memory, a nondeterministic library or code that only one rank runs break this silently. A digest is
computed of every tensor on its device. One collective of two integers shows whether the ranks agree
on all of them; only if they do not, the digests are exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from distmp.distributed.comparison import check_same
from distmp.engine.digests import describe
from distmp.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from torch import Tensor

    from distmp.engine.engine import Engine

ADVICE = (
    "continue from a checkpoint with --resume, and check the hardware of that machine if it "
    "happens again"
)


def check(engine: Engine, average: Mapping[str, Tensor] | None = None) -> None:
    """Compare the replicated tensors of an engine between ranks; every rank has to call it.

    Compares weights, 16-bit parameters, optimizer state, loss scale and step counts. Shards and
    buffers differ by design and are not compared: buffers follow the samples of each rank. The host
    waits for the device.

    Args:
        engine: An engine, between two steps.
        average: The `values` of a `WeightAverage`, to compare them, too.

    Raises:
        TrainingError: On every rank, with the first tensor that differs, and its digests by rank.

    Example:
        >>> import torch, distmp
        >>> from distmp.engine.rank_consistency import check
        >>> engine = distmp.Engine(
        ...     torch.nn.Linear(8, 4),
        ...     lambda module, batch: (module(batch).square().sum(), len(batch)),
        ...     lambda named: torch.optim.AdamW(named, fused=True),
        ...     policy="fp32",
        ... )
        >>> check(engine)  # returns if the ranks agree
    """
    world = engine.world
    if world.group is None:
        return
    state = engine.state_dict() | {f"ema/{name}": value for name, value in (average or {}).items()}
    described = describe(engine.module, state, world.device)
    try:
        check_same(world.group, world.device, described, ADVICE)
    except ConfigError as error:
        raise TrainingError(f"ranks differ: {error}") from None
