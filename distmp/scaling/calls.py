"""The calls of the scaler on each rank, as text and as a fingerprint that ranks compare.

The fingerprint is part of the vector that every decision reduces anyway. It covers all calls so
far, so ranks that differ in one call differ in all later fingerprints. Only if fingerprints differ,
ranks exchange the text.
"""

from __future__ import annotations

import gc
import itertools
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.distributed.comparison import FINGERPRINT_BITS, hyperparameters
from distmp.errors import keys_by_value, rank_names
from distmp.scaling.local_gradients import parameters
from distmp.utils.tensor_trees import checksum

# Number of parameters whose values are compared.
SAMPLED_PARAMETERS = 32


@torch.no_grad()
def identify(optimizer: torch.optim.Optimizer) -> str:
    """Return properties that are the same on all replicas of an optimizer; waits for the device.

    They are the class, the number of parameters, the first shape, and a checksum of options, shapes
    and values. Values of shards are not compared.
    """
    shapes = [tuple(parameter.shape) for parameter in parameters(optimizer)]
    # From each parameter only the start, because reshaping could copy the whole parameter.
    values: list[Any] = [
        parameter[:1]
        for parameter in parameters(optimizer)
        if parameter.dim() and not (parameter.is_meta or is_traceable_wrapper_subclass(parameter))
    ]
    digest = checksum([repr((hyperparameters(optimizer), shapes)), values[:SAMPLED_PARAMETERS]])
    count = f"{len(shapes)} parameter{'s' if len(shapes) != 1 else ''}"
    first = f", the first of shape {shapes[0]}" if shapes else ""
    return f"{type(optimizer).__name__} with {count}{first}, checksum {digest:08x}"


def all_identities() -> list[str]:
    """Return the identities of all optimizers that exist in this process.

    It searches all objects, which is slow, so call it only if ranks seem to differ.
    """
    gc.collect()  # an optimizer that is garbage is not used in another order
    return [
        identify(candidate)
        for candidate in gc.get_objects()
        # Not isinstance, which reads `__class__`: proxies may compute it.
        if issubclass(type(candidate), torch.optim.Optimizer) and hasattr(candidate, "param_groups")
    ]


ADVICE = "make the same calls of the scaler in the same order on every rank"


class Decision(NamedTuple):
    """A call that starts a decision of all ranks.

    Attributes:
        iteration: Index of the iteration, counted from 1; `update` ends an iteration.
        call: The call as text, with the iteration.
        before: The calls since the previous decision, as text.
        changes: The calls among these that change weights.
        new: Identities of the optimizers decided on for the first time, in the order of their
            numbers.
        digest: CRC-32 of this and all earlier decisions, without the identities of optimizers.
    """

    iteration: int
    call: str
    before: str
    changes: str
    new: list[str]
    digest: int

    @property
    def fingerprint(self) -> int:
        """A number that ranks compare: it includes the identities of new optimizers."""
        return zlib.crc32("".join(self.new).encode(), self.digest) % 2**FINGERPRINT_BITS


class CallLog:
    """Records the calls of one scaler on this rank. A copy, pickled or not, starts empty.

    Optimizers are numbered from 0 in the order in which they are decided on for the first time.

    Attributes:
        iteration: Index of the current iteration, counted from 1.
    """

    def __init__(self) -> None:
        self.iteration = 1
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._unused_numbers = itertools.count()
        self._before: list[str] = []
        self._changes: list[str] = []
        # Of this iteration. Sets, because after a common decision their order does not matter.
        self._unscaled: set[int] = set()
        self._updated: set[int] = set()
        self._digest = 0

    def __reduce__(self) -> tuple[type[CallLog], tuple[()]]:
        return CallLog, ()

    def unscales(self, optimizer: torch.optim.Optimizer) -> None:
        """Record `unscale_` after the decision."""
        if optimizer in self._numbers:
            self._unscaled.add(self._numbers[optimizer])

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the step of an optimizer that was decided on."""
        if optimizer in self._numbers:
            self._updated.add(self._numbers[optimizer])

    def updates(self, *, sets_scale: bool) -> None:
        """Record an update, which ends the iteration."""
        self._close_iteration("update(new_scale)" if sets_scale else "update()")
        self.iteration += 1

    def decide(
        self,
        method: str,
        called_with: Iterable[torch.optim.Optimizer],
        members: Sequence[torch.optim.Optimizer],
        *,
        unscaled: Sequence[torch.optim.Optimizer] = (),
        max_norm: float | None = None,
    ) -> Decision:
        """Record a decision and return it.

        Args:
            method: Name of the scaler's method that was called.
            called_with: The optimizers that it was called with.
            members: All optimizers that are decided on.
            unscaled: The optimizers that were unscaled before.
            max_norm: The norm to clip to.
        """
        new = self._number(members)
        named, decided, changed = (
            "".join(_optimizers({self._numbers[optimizer] for optimizer in group}))
            for group in (called_with, members, unscaled)
        )
        norm = [f"{float(max_norm)!r}"] if isinstance(max_norm, int | float) else []
        call = f"{method}({', '.join(filter(None, [named, *norm]))})"
        if decided != named:
            call += f" for {decided}"
        if changed:
            call += f" after unscale_({changed})"
        call += f" in iteration {self.iteration}"
        self._close_iteration("")
        before, changes = ", ".join(self._before), ", ".join(self._changes)
        self._before, self._changes = [], []
        self._digest = zlib.crc32(f"{before}|{call}|".encode(), self._digest)
        return Decision(self.iteration, call, before, changes, new, self._digest)

    def _number(self, members: Iterable[torch.optim.Optimizer]) -> list[str]:
        new = [optimizer for optimizer in members if optimizer not in self._numbers]
        for optimizer in new:
            self._numbers[optimizer] = next(self._unused_numbers)
        return [identify(optimizer) for optimizer in new]

    def _close_iteration(self, ending: str) -> None:
        unscaled = [f"unscale_({optimizers})" for optimizers in _optimizers(self._unscaled)]
        changes = [*unscaled, *(f"step({optimizers})" for optimizers in _optimizers(self._updated))]
        self._changes += [f"{change} in iteration {self.iteration}" for change in changes]
        if changes or ending:
            calls = _join([*changes, ending] if ending else changes)
            self._before.append(f"{calls} in iteration {self.iteration}")
        self._unscaled.clear()
        self._updated.clear()


# Gathers a value from the ranks; returns the value of each rank in its JSON form.
Gather = Callable[[Any], Mapping[int, Any]]


def difference(decision: Decision, world_size: int, gather: Gather) -> str | None:
    """Return how ranks differ, or None if only parameters differ, as with pipeline stages.

    Args:
        decision: The decision of this rank.
        world_size: Number of ranks.
        gather: Gathers a value from the ranks.
    """
    answers = gather([decision, all_identities()])
    decisions = {rank: Decision(*values) for rank, (values, _) in answers.items()}
    if len({decision.digest for decision in decisions.values()}) > 1 or len(answers) < world_size:
        return _different_calls(decisions)
    return _different_order(decisions, {rank: existing for rank, (_, existing) in answers.items()})


def _different_calls(decisions: Mapping[int, Decision]) -> str:
    calls = {rank: f"calls {decision.call}" for rank, decision in decisions.items()}
    before = {
        rank: f"called {decision.before or 'nothing'}" for rank, decision in decisions.items()
    }
    shown = before if len(set(calls.values())) == 1 < len(set(before.values())) else calls
    message = f"ranks call the scaler differently: {_by_rank(shown)}; {ADVICE}"
    if len({decision.changes for decision in decisions.values()}) > 1:
        message += "; weights now differ between ranks: continue from a checkpoint"
    return message


def _different_order(
    decisions: Mapping[int, Decision], existing: Mapping[int, Sequence[str]]
) -> str | None:
    """Return the order of optimizers on each rank, if ranks use the same ones in another order."""
    orders = {rank: decision.new for rank, decision in decisions.items()}
    if not any(
        one != other and one in existing[second] and other in existing[first]
        for first, second in itertools.combinations(orders, 2)
        for one, other in zip(orders[first], orders[second], strict=False)
    ):
        return None
    by_rank = keys_by_value({rank: _join(order) for rank, order in orders.items()})
    named = ", but ".join(f"{order} on {rank_names(ranks)}" for order, ranks in by_rank.items())
    call = next(iter(decisions.values())).call
    return f"ranks use their optimizers in a different order: {call} is {named}; {ADVICE}"


def _by_rank(calls: Mapping[int, str]) -> str:
    """Join the calls of ranks, each text once: "rank 0 calls A, ranks 1 and 2 call B"."""
    return ", ".join(
        f"{rank_names(ranks)} {call.replace('calls', 'call', len(ranks) - 1)}"
        for call, ranks in keys_by_value(calls).items()
    )


def _optimizers(numbers: Iterable[int]) -> list[str]:
    """Return ["optimizers 0 and 2"], or nothing for no numbers."""
    known = sorted(numbers)
    return [f"optimizer{'s' if len(known) > 1 else ''} {_join(known)}"] if known else []


def _join(items: Sequence[object]) -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last
