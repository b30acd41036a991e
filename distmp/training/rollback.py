"""Returns a run to an earlier checkpoint and continues it with later data.

This is not a callback, because it replaces the state, the position in the data and the current step
of the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distmp.checkpoint import store
from distmp.distributed.progress import current_phase
from distmp.engine.settings import DivergenceConfig
from distmp.errors import TrainingError
from distmp.training.callbacks.callback import Rollback, StepResult
from distmp.training.setup import Progress, restore

if TYPE_CHECKING:
    from distmp.training.trainer import Trainer


def roll_back(trainer: Trainer, result: StepResult) -> Rollback:
    """Load a checkpoint from before a step, and skip the data up to that step.

    The caller saves the new position, so that a restart does not train on the skipped data.
    Collective over all ranks.

    Args:
        trainer: The trainer, whose state, progress and checkpoints change.
        result: The step that is out of bounds.

    Raises:
        TrainingError: On every rank, after `divergence.max_rollbacks` rollbacks, or if there is no
            checkpoint to go back to.
    """
    assert result.spike is not None
    before = trainer.progress
    check_limit(result.step, result.spike.problem, before.rollbacks, trainer.config.divergence)
    current_phase.enter("going back to a checkpoint", transfers=True)
    trainer.checkpointing.writer.finish()
    checkpoint = checkpoint_before(trainer.directory.checkpoints, result.step)
    progress = _restore(trainer, checkpoint)
    first_sample = progress.samples
    skipped_steps = trainer.config.divergence.skip_data_steps
    progress.samples = result.samples + skipped_steps * trainer.config.batch.global_batch_size
    progress.rollbacks = before.rollbacks + 1
    progress.rolled_back_to = progress.step
    trainer.progress = progress
    trainer.checkpointing.writer.resumed(progress.step, saved=False)
    samples_skipped = progress.samples - first_sample
    return Rollback(result.step, progress.step, result.spike.problem, samples_skipped)


def message(rollback: Rollback, progress: Progress, max_rollbacks: int) -> str:
    """Return the line that reports a rollback.

    Args:
        rollback: The rollback.
        progress: The progress after the rollback.
        max_rollbacks: Setting `divergence.max_rollbacks`.
    """
    first_sample = progress.samples - rollback.samples_skipped
    return (
        f"step {rollback.from_step}: {rollback.problem}; back to step {rollback.to_step}, "
        f"continuing with sample {progress.samples} instead of {first_sample} (rollback "
        f"{progress.rollbacks} of at most {max_rollbacks})"
    )


def _restore(trainer: Trainer, checkpoint: store.StoredCheckpoint) -> Progress:
    """Load a checkpoint, but keep the statistics of the spike check.

    Early in a run the older statistics would still be in their warm-up.
    """
    guard = trainer.engine.divergence
    statistics = {name: value.clone() for name, value in guard.state_dict().items()}
    progress = trainer.world.ranks.all_or_none(lambda: restore(trainer.engine, checkpoint))
    trainer.restore_callbacks(checkpoint)
    guard.load_state_dict(statistics)
    return progress


def check_limit(step: int, problem: str, rollbacks: int, config: DivergenceConfig) -> None:
    """Raise if the run has used up its rollbacks.

    Raises:
        TrainingError: On every rank.
    """
    if rollbacks >= config.max_rollbacks:
        raise TrainingError(
            f"divergence.max_rollbacks = {config.max_rollbacks}: step {step}: {problem}, "
            f"and the run has already rolled back {rollbacks} times; lower optim.lr or "
            "optim.max_norm, or inspect the data, and continue with --resume auto and a larger "
            "divergence.max_rollbacks, or with the path of an earlier checkpoint"
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
