"""What each rank calls the scaler with, in words and as a number that ranks compare.

The number travels in the vector that every decision reduces anyway. It covers all calls up to this
one, so that ranks that are one decision apart see it at once, and it stays different from then on.
Only if numbers differ, ranks exchange the words.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from distmp.distributed.compare_ranks import FINGERPRINT_BITS
from distmp.scaling.optimizer_identity import OptimizerIdentity, all_identities, identify

ADVICE = "make the same calls of the scaler in the same order on every rank"


class Decision(NamedTuple):
    """A decision as this rank calls for it.

    Attributes:
        iteration: Counted from 1, by calls of `update`.
        doing: The call in words, with the iteration.
        before: The calls since the decision before, in words.
        changes: Those of these calls that change weights.
        new: The optimizers decided on for the first time, in the order of their numbers.
        digest: Of this decision and all before, without the identities of optimizers.
    """

    iteration: int
    doing: str
    before: str
    changes: tuple[str, ...]
    new: tuple[OptimizerIdentity, ...]
    digest: int

    @property
    def fingerprint(self) -> int:
        """The number that ranks compare."""
        identities = repr([identity.digest for identity in self.new]) if self.new else ""
        return zlib.crc32(identities.encode(), self.digest) % 2**FINGERPRINT_BITS

    @classmethod
    def from_json(cls, values: Any) -> Decision:
        """Return a decision that has been JSON in between, in which tuples are lists."""
        iteration, doing, before, changes, new, digest = values
        identities = tuple(OptimizerIdentity(*identity) for identity in new)
        return cls(iteration, doing, before, tuple(changes), identities, digest)


class CallLog:
    """The calls of one scaler on this rank. A copy, pickled or not, begins anew.

    Optimizers are numbered from 0 in the order in which they are decided on for the first time.

    Attributes:
        iteration: The one under way, counted from 1.
    """

    def __init__(self) -> None:
        self.iteration = 1
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._numbered = 0
        self._before: list[str] = []
        self._changes: list[str] = []
        # In this iteration; sets, because after a common decision their order is of no matter.
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        self._digest = 0

    def __reduce__(self) -> tuple[type[CallLog], tuple[()]]:
        return CallLog, ()

    def unscales(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer that was decided on is unscaled, where that rounds otherwise."""
        if optimizer in self._numbers:
            self._unscaled.add(self._numbers[optimizer])

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the step of an optimizer that was decided on."""
        if optimizer in self._numbers:
            self._stepped.add(self._numbers[optimizer])

    def updates(self, *, sets_scale: bool) -> None:
        """Note an update, which ends the iteration."""
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
        """Note a decision and return it.

        Args:
            method: The scaler's method that was called.
            called_with: The optimizers that it was called with.
            members: All optimizers that are decided on.
            unscaled: Those that the same step changes in another way, because they were unscaled.
            max_norm: The norm to which it clips.
        """
        new = self._number(members)
        named, decided, changed = (
            "".join(_optimizers({self._numbers[optimizer] for optimizer in group}))
            for group in (called_with, members, unscaled)
        )
        limit = [] if max_norm is None or _is_on_device(max_norm) else [f"{float(max_norm)!r}"]
        doing = f"{method}({', '.join(filter(None, [named, *limit]))})"
        if decided != named:
            doing += f" for {decided}"
        if changed:
            doing += f" after unscale_({changed})"
        doing += f" in iteration {self.iteration}"
        self._close_iteration("")
        before, changes = ", ".join(self._before), tuple(self._changes)
        self._before, self._changes = [], []
        self._digest = zlib.crc32(f"{before}|{doing}|".encode(), self._digest)
        return Decision(self.iteration, doing, before, changes, new, self._digest)

    def _number(self, members: Iterable[torch.optim.Optimizer]) -> tuple[OptimizerIdentity, ...]:
        new = [optimizer for optimizer in members if optimizer not in self._numbers]
        for optimizer in new:
            self._numbers[optimizer] = self._numbered
            self._numbered += 1
        return tuple(identify(optimizer) for optimizer in new)

    def _close_iteration(self, ending: str) -> None:
        unscaled = [f"unscale_({optimizers})" for optimizers in _optimizers(self._unscaled)]
        changes = [*unscaled, *(f"step({optimizers})" for optimizers in _optimizers(self._stepped))]
        self._changes += [f"{change} in iteration {self.iteration}" for change in changes]
        if changes or ending:
            done = _listed([*changes, ending] if ending else changes)
            self._before.append(f"{done} in iteration {self.iteration}")
        self._unscaled.clear()
        self._stepped.clear()


# Gives the other ranks a value under a name, and returns that of each rank, as JSON returns it.
Exchange = Callable[[str, Any], Mapping[int, Any]]


def difference(decision: Decision, world_size: int, exchange: Exchange) -> str | None:
    """Return in what ranks differ, or None if only parameters differ, as with pipeline stages.

    Args:
        decision: As this rank calls for it.
        world_size: Number of ranks.
        exchange: Tells other ranks something and returns what they tell.
    """
    answers = exchange("decision", decision)
    decisions = {rank: Decision.from_json(answer) for rank, answer in answers.items()}
    if len({decision.digest for decision in decisions.values()}) > 1 or len(answers) < world_size:
        return _different_calls(decisions)
    if len({decision.new for decision in decisions.values()}) > 1:
        return _different_order(decisions, exchange("optimizers", all_identities()))
    return None


def _different_calls(decisions: Mapping[int, Decision]) -> str:
    calls = {rank: f"calls {decision.doing}" for rank, decision in decisions.items()}
    if len(set(calls.values())) == 1:
        calls = {
            rank: f"called {decision.before}" if decision.before else "called nothing"
            for rank, decision in decisions.items()
        }
    if len(set(calls.values())) == 1:
        # Of an earlier decision whose numbers were equal by chance, or other ranks are silent.
        calls = {rank: f"calls {decision.doing}" for rank, decision in decisions.items()}
    message = f"ranks call the scaler differently: {_by_rank(calls)}; {ADVICE}"
    if len({decision.changes for decision in decisions.values()}) > 1:
        message += "; weights now differ between ranks: continue from a checkpoint"
    return message


def _different_order(
    decisions: Mapping[int, Decision], optimizers: Mapping[int, Sequence[int]]
) -> str | None:
    """Return which optimizers ranks use, if some have one like another rank's and use another."""
    first = min(decisions)
    ranks_by_order: dict[tuple[OptimizerIdentity, ...], list[int]] = {}
    is_other_order = False
    for rank, decision in decisions.items():
        ranks_by_order.setdefault(decision.new, []).append(rank)
        for ours, theirs in zip(decisions[first].new, decision.new, strict=False):
            has_ours = ours.digest in optimizers.get(rank, ())
            has_theirs = theirs.digest in optimizers.get(first, ())
            is_other_order |= ours.digest != theirs.digest and has_ours and has_theirs
    if not is_other_order:
        return None
    orders = [
        f"{_listed([identity.text for identity in order])} on {ranks_in_words(ranks)}"
        for order, ranks in ranks_by_order.items()
    ]
    return (
        "ranks use their optimizers in a different order: "
        f"{decisions[first].doing} is {', but another one, '.join(orders)}; {ADVICE}"
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 2 and 5"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed(ranks)}"


def _by_rank(calls: Mapping[int, str]) -> str:
    """Join what ranks "calls" or "called", each text once."""
    ranks_by_call: dict[str, list[int]] = {}
    for rank, call in calls.items():
        ranks_by_call.setdefault(call, []).append(rank)
    return ", ".join(
        f"{ranks_in_words(ranks)} {call.replace('calls', 'call', len(ranks) - 1)}"
        for call, ranks in ranks_by_call.items()
    )


def _is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _optimizers(numbers: Iterable[int]) -> list[str]:
    """Return ["optimizers 0 and 2"], or nothing for no numbers."""
    known = sorted(numbers)
    return [f"optimizer{'s' if len(known) > 1 else ''} {_listed(known)}"] if known else []


def _listed(items: Sequence[object]) -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last
