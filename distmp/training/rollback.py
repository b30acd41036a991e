"""Returns a run to an earlier checkpoint and continues it with later data.

This is not a callback, because it replaces the state, the position in the data and the current step
of the loop.
"""

from __future__ import annotations

from distmp.checkpoint import store
from distmp.engine import Engine
from distmp.errors import TrainingError
from distmp.training.callbacks.callback import Rollback, StepResult
from distmp.training.setup import Progress, restore

MAX_ROLLBACKS = 5


def roll_back(
    engine: Engine, directory: store.Location, result: StepResult, before: Progress
) -> tuple[store.StoredCheckpoint, Progress, Rollback]:
    """Load a checkpoint from before a step into the engine, and skip the data up to that step.

    The statistics of the spike check stay: early in a run, older ones would still be in their
    warm-up. Collective over all ranks.

    Args:
        engine: Receives the state.
        directory: Holds the checkpoints of the run.
        result: The step that is out of bounds.
        before: The progress up to that step.

    Returns:
        The checkpoint, the new progress, and what was done. The caller saves the new position, so
        that a restart does not train on the skipped data.

    Raises:
        TrainingError: On every rank, after `MAX_ROLLBACKS` rollbacks, or if there is no checkpoint
            to go back to.
    """
    assert result.spike is not None
    step, problem = result.step, result.spike.problem
    check_limit(step, problem, before.rollbacks)
    checkpoint = checkpoint_before(directory, step)
    guard = engine.divergence
    statistics = {name: value.clone() for name, value in guard.state_dict().items()}
    stored = engine.world.ranks.all_or_none(lambda: restore(engine, checkpoint))
    guard.load_state_dict(statistics)
    progress = Progress(stored.step, result.samples, before.rollbacks + 1, stored.step)
    done = Rollback(step, stored.step, problem, result.samples - stored.samples)
    return checkpoint, progress, done


def message(rollback: Rollback, progress: Progress) -> str:
    """Return the line that reports a rollback.

    Args:
        rollback: The rollback.
        progress: The progress after the rollback.
    """
    first_sample = progress.samples - rollback.samples_skipped
    return (
        f"step {rollback.from_step}: {rollback.problem}; back to step {rollback.to_step}, "
        f"continuing with sample {progress.samples} instead of {first_sample} (rollback "
        f"{progress.rollbacks} of at most {MAX_ROLLBACKS})"
    )


def check_limit(step: int, problem: str, rollbacks: int) -> None:
    """Raise if the run has used up its rollbacks.

    Raises:
        TrainingError: On every rank.
    """
    if rollbacks >= MAX_ROLLBACKS:
        raise TrainingError(
            f"step {step}: {problem}, and the run has already rolled back {rollbacks} times; lower "
            "optim.lr or optim.max_norm, or inspect the data, and continue with --resume and the "
            "path of an earlier checkpoint"
        )


def checkpoint_before(directory: store.Location, step: int) -> store.StoredCheckpoint:
    """Return the checkpoint to go back to from `step`. Collective over all ranks.

    This is the latest healthy one of an earlier step. If the run went back to that one before and
    has not reached another checkpoint since, it is the one before it, where there is one.

    Args:
        directory: Holds the checkpoints of the run.
        step: The step that is out of bounds.

    Raises:
        TrainingError: On every rank, if there is none.
    """
    latest = store.usable(directory, before=step).checkpoint
    if latest is None:
        raise TrainingError(
            f"{directory} has no healthy checkpoint before step {step} to roll back to"
        )
    numbers = latest.numbers
    if numbers.get("rolled_back_to") != numbers["step"]:
        return latest
    return store.usable(directory, before=numbers["step"]).checkpoint or latest
