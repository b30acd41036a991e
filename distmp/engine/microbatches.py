"""The microbatches of a step: their source, tensors, losses, weights and random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.utils.host_copy import to_device
from distmp.utils.tensor_trees import map_tensors

_END = object()


class MicrobatchSource:
    """Draws the microbatches of a step one at a time, and holds at most the next one.

    Before each microbatch of an iterable that is not a sequence, call `advance`.

    Args:
        microbatches: A sequence, or an iterable that gives `count` microbatches and then ends.
        count: Number of microbatches of the step.
        keep: Whether to keep all microbatches, for a replay of the step.

    Attributes:
        count: Number of microbatches of the step.
        is_sequence: Whether `count` is known to be right.
        is_list: Whether drawing a microbatch runs no code of the caller.
        kept: The microbatches drawn, with `keep`; otherwise empty.
        problem: How the iterable differs from `count`; None if it does not.
    """

    def __init__(self, microbatches: Iterable[Any], count: int, *, keep: bool) -> None:
        self.count = count
        self.is_sequence = isinstance(microbatches, Sequence)
        self.is_list = type(microbatches) in (list, tuple)
        self.kept: list[Any] = [*microbatches] if keep and self.is_sequence else []
        self.problem: str | None = None
        self._keeps = keep
        self._iterator = iter(microbatches)
        self._drawn = 0
        self._next: Any = next(self._iterator) if self.is_sequence else _END
        self._sequence = microbatches if self.is_sequence else ()

    @property
    def next(self) -> Any:
        """The microbatch that `advance` has drawn; the first one of a sequence."""
        return self._next

    def advance(self) -> bool:
        """Draw the next microbatch, unless it is drawn already; return whether there is one."""
        if self._next is _END:
            self._next = next(self._iterator, _END)
        if self._next is _END:
            self.problem = f"ended after {self._drawn} of {self.count} microbatches"
        return self._next is not _END

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the microbatches."""
        # The iterator of a list needs no Python call per microbatch.
        return iter(self._sequence) if self.is_sequence else self

    def __next__(self) -> Any:
        """Return the microbatch that `advance` has drawn, and drop the reference to it."""
        batch, self._next = self._next, _END
        self._drawn += 1
        if self._keeps:
            self.kept.append(batch)
        return batch

    def end(self) -> None:
        """Check that an iterable has ended."""
        if self.is_sequence or self.problem is not None:
            return
        if next(self._iterator, _END) is not _END:
            self.problem = f"has more than {self.count} microbatches"

    def error(self) -> ConfigError:
        """Return the error about the problem."""
        return ConfigError("microbatches", self.problem, WRONG_COUNT)


WRONG_COUNT = (
    "the step was not taken; pass an iterable of the microbatches of one step and their number: "
    "engine.step(itertools.islice(iterator, n), count=n)"
)


class MicrobatchStats(NamedTuple):
    """Statistics of the microbatches of a step on this rank; each list has one entry for each.

    Attributes:
        losses: Loss sum of each microbatch, 0-dim.
        loss_sums: Loss sum of each microbatch, 0-dim; 0 if the microbatch was dropped.
        weights: Weight of each microbatch, 0-dim; 0 if the microbatch was dropped.
        dropped: Whether each microbatch was dropped, 0-dim bool; empty if none can be dropped.
        streams: Key of the random numbers of each microbatch, see `seed_generators`.
    """

    losses: list[Tensor]
    loss_sums: list[Tensor]
    weights: list[Tensor]
    dropped: list[Tensor]
    streams: list[str]

    @classmethod
    def empty(cls) -> MicrobatchStats:
        """Return statistics without any microbatch."""
        return cls([], [], [], [], [])

    def add(self, loss: Tensor, weight: Tensor, kept: Tensor | None) -> None:
        """Add a microbatch.

        Args:
            loss: Loss sum, 0-dim, detached; not written to afterwards.
            weight: Weight, 0-dim.
            kept: 0-dim bool, False drops the microbatch; None if microbatches cannot be dropped.
        """
        self.losses.append(loss)
        if kept is not None:
            loss = torch.where(kept, loss, 0.0)
            weight = torch.where(kept, weight, 0)
            self.dropped.append(~kept)
        self.loss_sums.append(loss)
        self.weights.append(weight)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device; the host waits only for copies to the host.

    Args:
        batch: A tensor, or nested containers of tensors and other objects, see torch's pytrees.
        device: The device.
    """
    return map_tensors(partial(to_device, device=device), batch)
