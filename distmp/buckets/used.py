"""Which parameters training has used, and so which of them an optimizer steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


class UsedParameters(Generic[Key]):
    """Follows which parameters have ever had a gradient, on any rank.

    A parameter that no rank has ever used is left alone, as in plain torch: the optimizer finds
    None, keeps no state for it and does not decay it. From its first gradient on, a step in which
    no rank uses it counts as a zero gradient, so momentum and decay continue. To leave it alone in
    such a step too, the host would have to ask all ranks, and wait, in every step.

    A dropped microbatch and a skipped step leave no trace, so they do not count as use.

    In each step call `begin_step`; for each microbatch `note` for each gradient, then
    `end_microbatch`; then `exchange_flags`; and `end_step` when it is known whether the step was
    skipped. While there are unused parameters, `exchange_flags` reduces one flag for each of them
    and the host waits for the result. Once all are used, nothing is exchanged.

    Args:
        parameters: What stands for parameters that nobody has used yet, as their names do; on all
            ranks in the same order.
        group: The ranks; None for a single process.
        device: Where flags are exchanged.
    """

    def __init__(
        self, parameters: Iterable[Key], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._group = group
        self._device = device
        self._unused = dict.fromkeys(parameters)  # in the order that all ranks have
        # Of this rank in this step: in the microbatch under way, in those that count for sure, and
        # in those of which the device knows whether they were dropped.
        self._now: set[Key] = set()
        self._here: set[Key] = set()
        self._droppable: list[tuple[set[Key], Tensor]] = []
        # Used for the first time in the last step, and whether that step was skipped.
        self._first: set[Key] = set()
        self._skipped: Tensor | None = None

    def add(self, parameters: Iterable[Key]) -> None:
        """Follow more parameters, which nobody has used yet."""
        self._unused.update(dict.fromkeys(parameters))

    def begin_step(self) -> None:
        """Forget what a step that was not finished has noted."""
        self._now = set()
        self._here = set()
        self._droppable = []

    def awaits(self, parameter: Key) -> bool:
        """Return whether a gradient of this parameter would be news."""
        return parameter in self._unused

    def note(self, parameter: Key) -> None:
        """Take note of a gradient on this rank."""
        if parameter in self._unused:
            self._now.add(parameter)

    def end_microbatch(self, kept: Tensor | None = None) -> None:
        """End a microbatch, which counts unless `kept`, 0-dim bool, says that it was dropped."""
        if kept is None:
            self._here |= self._now
        elif self._now:
            self._droppable.append((self._now, kept))
        self._now = set()

    def exchange_flags(self) -> None:
        """Find out what all ranks together have used in this step; every rank has to call it."""
        self._settle()
        if not self._unused:
            return
        self.end_microbatch()
        answers = zip(self._unused, self._used_by_anybody(), strict=True)
        self._first = {parameter for parameter, used in answers if used}
        self.begin_step()

    def end_step(self, skipped: Tensor) -> None:
        """Take note of the end of a step; the host does not wait.

        Args:
            skipped: 0-dim, not 0 if the step was skipped; the same on all ranks.
        """
        self._skipped = skipped

    def leaves_alone(self, parameter: Key) -> bool:
        """Return whether the optimizer is to find no gradient of a parameter in this step."""
        return parameter in self._unused and parameter not in self._first

    @property
    def unused(self) -> list[Key]:
        """The parameters that no step has used; the host waits for the last step."""
        self._settle()
        return list(self._unused)

    @unused.setter
    def unused(self, parameters: Iterable[Key]) -> None:
        self._unused = dict.fromkeys(parameters)
        self._first = set()
        self._skipped = None
        self.begin_step()

    def _settle(self) -> None:
        """Count the last step, unless it was skipped."""
        if self._first and (self._skipped is None or not on_host(self._skipped)):
            self._unused = {key: None for key in self._unused if key not in self._first}
        self._first = set()
        self._skipped = None

    def _used_by_anybody(self) -> list[int]:
        """Return for each unused parameter whether a rank has had a gradient of it."""
        if self._group is None and not self._droppable:
            return [parameter in self._here for parameter in self._unused]
        flags = self._flags(self._here)
        for used, kept in self._droppable:
            flags = flags.maximum(self._flags(used) * kept)
        if self._group is not None:
            dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
        return on_host(flags)

    def _flags(self, used: set[Key]) -> Tensor:
        flags = [parameter in used for parameter in self._unused]
        return torch.tensor(flags, dtype=torch.uint8, device=self._device)


def on_host(values: Tensor) -> Any:
    """Return values for which the host has to wait."""
    return values.tolist()
