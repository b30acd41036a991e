"""What follows from a step whose loss or norm is out of bounds, and where a run goes back to."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from distmp.checkpoint import store
from distmp.engine.outcome import StepNumbers
from distmp.engine.spike_check import DivergenceConfig
from distmp.errors import TrainingError


class SpikeAction(NamedTuple):
    """A step that is out of bounds.

    Attributes:
        problem: What is wrong with it, in words.
        action: "warn", "skip" or "rollback".
    """

    problem: str
    action: str

    def to_record(self) -> dict[str, Any]:
        """Return it as the records of a run have it."""
        return self._asdict()


def look(numbers: StepNumbers, config: DivergenceConfig) -> SpikeAction | None:
    """Return what is to be said and done about a step, None if nothing; the same on every rank."""
    if numbers.weight > 0 and not math.isfinite(numbers.loss):
        problem, action = f"the loss is {numbers.loss}", config.on_nonfinite_loss
    elif numbers.spike:
        problem, action = _spike_in_words(numbers), config.on_spike
    else:
        return None
    return None if action == "ignore" else SpikeAction(problem, action)


def _spike_in_words(numbers: StepNumbers) -> str:
    found = []
    if numbers.loss > numbers.loss_limit:
        found.append(f"loss {numbers.loss:.4g} is above its limit of {numbers.loss_limit:.4g}")
    if numbers.grad_norm > numbers.norm_limit:
        found.append(f"norm {numbers.grad_norm:.4g} is above its limit of {numbers.norm_limit:.4g}")
    return " and ".join(found)


def check_limit(step: int, spike: SpikeAction, rollbacks: int, config: DivergenceConfig) -> None:
    """Raise if a run has gone back often enough.

    Raises:
        TrainingError: On every rank alike.
    """
    if rollbacks >= config.max_rollbacks:
        raise TrainingError(
            f"divergence.max_rollbacks = {config.max_rollbacks}: step {step}: {spike.problem}, "
            f"and the run has gone back {rollbacks} times already; lower optim.lr or "
            "optim.max_norm, or look at the data, and go on with --resume auto and a larger "
            "divergence.max_rollbacks, or with the path of an earlier checkpoint"
        )


def checkpoint_before(directory: store.Location, step: int) -> store.StoredCheckpoint:
    """Return the checkpoint to go back to from `step`. Collective over all ranks.

    That is the latest one of an earlier step that is not damaged. If the run has gone back to that
    one already and has not come to the next since, the one before it, where there is one.

    Args:
        directory: Holds the checkpoints of the run.
        step: The step that is out of bounds.

    Raises:
        TrainingError: On every rank alike, if there is none.
    """
    latest = store.usable(directory, before=step).checkpoint
    if latest is None:
        raise TrainingError(f"{directory} has no checkpoint of a step before {step} to go back to")
    numbers = latest.numbers
    if numbers.get("rolled_back_to") != numbers["step"]:
        return latest
    return store.usable(directory, before=numbers["step"]).checkpoint or latest
