"""Runs that go back to a checkpoint and skip data: the real trainer, on real ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import load
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.errors import TrainingError
from distmp.telemetry.measurements import StepTimer
from distmp.telemetry.records import StepRecord, read_records
from distmp.training import trainer as trainer_module
from distmp.training.callbacks import TrainingLoop
from distmp.training.trainer import Trainer
from tests.ranks import ranks
from tests.reference import assert_same_bits, gathered, snapshot, trained
from tests.toys import BATCH, Points, finished, regression_run, trainer_of


def dataset(
    split: str, sequence_length: int, poisoned: list[int] | None = None, poison: float = 0.0
) -> Points | None:
    """Return points of which those at some positions of the order are poisoned."""
    return Points(dict.fromkeys(poisoned or [], poison)) if split == "train" else None


def squared(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (module(batch["inputs"]) - batch["targets"]).square().sum(), len(batch["inputs"])


def trainer(directory: Path, *arguments: str, poisoned: list[int], poison: float = 1e4) -> Trainer:
    options = f"--data.options={{poisoned: {poisoned}, poison: {yaml.dump(poison)[:-5]}}}"
    more = (f"--run-dir={directory / 'run'}", "--log.console=plain", "--log.every=1", *arguments)
    return trainer_of(load(regression_run(__name__, options, *more)))


def run(directory: Path, *arguments: str, **data: Any) -> Trainer:
    return finished(trainer(directory, *arguments, **data))


def records(directory: Path) -> list[StepRecord]:
    return read_records(directory / "run" / "steps.jsonl")


def samples_of(step: int) -> list[int]:
    """The positions of the samples of a step, counted from 1, of a run that never goes back."""
    return [*range((step - 1) * BATCH, step * BATCH)]


ROLLBACK = ("--divergence.on-spike=rollback",)


def never_saw(directory: Path, last: int, first: int, *arguments: str) -> Trainer:
    """Train `last` steps, then the rest of the run with the samples from `first` on."""
    begun = trainer(directory, *arguments, poisoned=[])
    with begun.active(StopSignals()):
        for until, start in ((last, 0), (begun.config.steps, first)):
            begun.config = dataclasses.replace(begun.config, steps=until)
            begun.progress.samples = start
            begun.train()
    return begun


def die_after_the_rollback(run: Trainer) -> None:
    train_steps = run._train_steps

    def die() -> None:
        if run.progress.rollbacks:
            raise ArithmeticError
        train_steps()

    run._train_steps = die  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError), run.active(StopSignals()):
        run.train()


@pytest.mark.nightly
@ranks(2, timeout=100)
def test_rollback_agrees_with_run_without_the_window(tmp_path: Path) -> None:
    rank = World.current("cpu").rank
    for strategy in ("ddp", "fsdp"):
        directory, other = tmp_path / strategy, tmp_path / f"{strategy}-other"
        arguments = (f"--strategy={strategy}", "--ema.decay=0.8")
        # Step 9 is bad. The last checkpoint before it is of step 6: steps 7 to 9 are skipped.
        found = run(directory, *ROLLBACK, *arguments, poisoned=[samples_of(9)[5]])
        clean = never_saw(other, 6, 9 * BATCH, *arguments)
        averages = [gathered(trainer.states.tensors()) for trainer in (found, clean)]
        assert_same_bits(*averages)
        assert "callbacks/Ema/0.weight" in averages[0]
        assert_same_bits(trained(snapshot(found.engine)), trained(snapshot(clean.engine)))
        assert (found.progress.step, found.progress.samples) == (14, 17 * BATCH)
        assert found.progress.rollbacks == 1
        if rank:
            continue
        logged = records(directory)
        assert [record.step for record in logged] == [*range(1, 15)]
        assert [record.samples for record in logged] == [
            BATCH * (step if step <= 6 else step + 3) for step in range(1, 15)
        ]
        first = logged[6].divergence
        assert first is not None
        assert "is above its limit of" in first["rolled_back"].pop("problem")
        assert first == {
            "rolled_back": {"from_step": 9, "to_step": 6, "samples_skipped": 3 * BATCH}
        }
        assert {record.divergence is None for record in logged if record.step != 7} == {True}
        numbers = StoredCheckpoint(directory / "run" / "checkpoints" / "step-000014").state.numbers
        assert (numbers["rollbacks"], numbers["rolled_back_to"]) == (1, 6)


@pytest.mark.nightly
@ranks(1)
def test_average_missing_in_checkpoint_starts_again(tmp_path: Path) -> None:
    """The weights of the steps that the rollback undoes are not in it."""
    averaged = ("--schedule.name=constant", "--ema.decay=0.8", "--resume=auto")
    averages = []
    for skips in (False, True):
        directory, poisoned = tmp_path / f"skips-{skips}", [samples_of(9)[5]]
        run(directory, *ROLLBACK, "--schedule.name=constant", "--steps=6", poisoned=poisoned)
        resumed = trainer(directory, *ROLLBACK, *averaged, poisoned=poisoned)
        if skips:
            resumed.progress.samples = 9 * BATCH
        with resumed.active(StopSignals()):
            resumed.train()
        assert resumed.progress.rollbacks == (0 if skips else 1)
        averages.append(gathered(resumed.states.tensors()))
    assert "callbacks/Ema/0.weight" in averages[0]
    assert_same_bits(*averages)


@ranks(1)
def test_average_started_after_rollback_is_saved(tmp_path: Path) -> None:
    """A restart right after the rollback continues with it, not with the one of the bad steps."""
    poisoned = [samples_of(9)[5]]
    run(tmp_path, *ROLLBACK, "--steps=6", poisoned=poisoned)
    resumed = trainer(tmp_path, *ROLLBACK, "--ema.decay=0.8", "--resume=auto", poisoned=poisoned)
    die_after_the_rollback(resumed)
    checkpoint = StoredCheckpoint(tmp_path / "run" / "checkpoints" / "step-000006")
    assert checkpoint.state.numbers["rollbacks"] == 1
    names = ("model/0.weight", "callbacks/Ema/0.weight")
    weights, average = stored = [torch.empty(8, 6) for _ in names]
    checkpoint.load(dict(zip(names, stored, strict=True)))
    assert torch.equal(average, weights)


@ranks(1)
def test_rollback_is_not_part_of_a_step(tmp_path: Path) -> None:
    slow, seconds = trainer(tmp_path, *ROLLBACK, poisoned=[samples_of(9)[5]]), [0.0]
    save, slow.timer = slow.checkpointing.save_now, StepTimer(lambda: seconds[0])

    def save_slowly(run: TrainingLoop) -> None:
        seconds[0] += 100.0
        save(run)

    slow.checkpointing.save_now = save_slowly  # type: ignore[method-assign]
    finished(slow)
    assert slow.progress.rollbacks == 1
    assert max(record.step_seconds for record in records(tmp_path)) < 100


@ranks(1)
def test_rollback_passes_over_checkpoints_of_abandoned_run(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    often = ("--checkpoint.every=2", "--checkpoint.keep=10")
    bad = [samples_of(9)[5]]
    run(tmp_path, *often, "--steps=6", poisoned=bad)
    back = (f"--resume={checkpoints / 'step-000002'}", "--checkpoint.every=100", "--steps=10")
    found = run(tmp_path, *ROLLBACK, *back, "--optim.lr=0.01", poisoned=bad)
    rolled_back = [each.divergence for each in records(tmp_path) if each.divergence]
    assert rolled_back[0]["rolled_back"]["to_step"] == 2
    assert found.progress.rollbacks == 1


@ranks(1)
def test_rollback_of_abandoned_branch_stays_in_it(tmp_path: Path) -> None:
    checkpoints, bad = tmp_path / "run" / "checkpoints", [samples_of(9)[5]]

    def weight(name: str) -> Tensor:
        value = torch.empty(8, 6)
        StoredCheckpoint(checkpoints / name).load({"model/0.weight": value})
        return value

    often = ("--checkpoint.every=2", "--checkpoint.keep=10")
    run(tmp_path, *often, "--steps=6", poisoned=bad)
    back = f"--resume={checkpoints / 'step-000002'}"
    run(tmp_path, *often, back, "--steps=6", "--optim.lr=0.01", poisoned=bad)
    assert not (tmp_path / "run" / "steps.jsonl.abandoned").exists()
    abandoned = weight("step-000004.abandoned")
    assert not torch.equal(weight("step-000004"), abandoned)
    back = f"--resume={checkpoints / 'step-000004.abandoned'}"
    found = run(tmp_path, *ROLLBACK, back, "--checkpoint.every=100", "--steps=10", poisoned=bad)
    assert (found.progress.rollbacks, found.progress.rolled_back_to) == (1, 4)
    assert torch.equal(weight("step-000004"), abandoned)


@ranks(1)
def test_rollback_with_another_optimizer_than_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, "--steps=4", "--optim.name=adamw", poisoned=[])
    other = ("--optim.name=sgd", "--optim.options={momentum: 0.9}", "--resume-force=true")
    resumed = ("--resume=auto", "--steps=10", "--checkpoint.every=100")
    found = run(tmp_path, *ROLLBACK, *resumed, *other, poisoned=[samples_of(9)[5]])
    assert found.progress.rollbacks == 1


@pytest.mark.nightly
@ranks(2, timeout=100)
def test_resume_does_not_repeat_rollback(tmp_path: Path) -> None:
    """Wherever it is killed: its checkpoint already has the new data position."""
    bad = [samples_of(9)[0]]
    whole = run(tmp_path / "whole", *ROLLBACK, poisoned=bad)
    killed = trainer(tmp_path / "killed", *ROLLBACK, poisoned=bad)
    die_after_the_rollback(killed)
    resumed = trainer(tmp_path / "killed", *ROLLBACK, "--resume=auto", poisoned=bad)
    assert (resumed.progress.step, resumed.progress.samples) == (6, 9 * BATCH)
    assert resumed.run(StopSignals())
    assert resumed.progress == whole.progress
    assert resumed.progress.rollbacks == 1
    assert_same_bits(snapshot(resumed.engine), snapshot(whole.engine))


@pytest.mark.nightly
@ranks(2, timeout=100)
def test_second_rollback_goes_back_further_until_limit(tmp_path: Path) -> None:
    # Steps 9 to 11 are bad. Back to 6, continue with the data of 10: bad. That checkpoint has been
    # tried: back to 3, continue with the data of 11, which is bad too.
    bad = [sample for step in (9, 10, 11) for sample in samples_of(step)]
    limited = trainer(tmp_path, *ROLLBACK, poisoned=bad)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_module, "MAX_ROLLBACKS", 2)
        with pytest.raises(TrainingError) as caught:
            limited.run(StopSignals())
    message = str(caught.value)
    assert message.startswith("step 4: ")
    assert "the run has already rolled back 2 times" in message
    assert (limited.progress.rollbacks, limited.progress.rolled_back_to) == (2, 3)
    # With more rollbacks allowed, it skips the third as well. There is no older checkpoint.
    resumed = run(tmp_path, *ROLLBACK, "--resume=auto", poisoned=bad)
    assert (resumed.progress.rollbacks, resumed.progress.rolled_back_to) == (3, 3)
    assert resumed.progress.samples == (11 + 11) * BATCH
    # A spike before the first checkpoint leads back to the start.
    early = run(tmp_path / "e", *ROLLBACK, "--divergence.warmup-steps=1", poisoned=samples_of(2))
    assert (early.progress.rolled_back_to, early.progress.samples) == (0, 16 * BATCH)


@pytest.mark.nightly
@ranks(1)
def test_non_finite_loss_rolls_back_and_spike_warns(tmp_path: Path) -> None:
    bad = [samples_of(9)[3]]
    found = run(tmp_path / "nan", *ROLLBACK, poisoned=bad, poison=float("inf"))
    clean = never_saw(tmp_path / "clean", 6, 9 * BATCH)
    assert_same_bits(trained(snapshot(found.engine)), trained(snapshot(clean.engine)))

    warned = run(tmp_path / "warned", poisoned=bad)
    logged = records(tmp_path / "warned")
    marked = [record for record in logged if record.divergence is not None]
    assert [record.step for record in marked] == [9]
    assert marked[0].divergence is not None
    assert marked[0].divergence["action"] == "warn"
    assert warned.progress.rollbacks == 0
    assert not marked[0].skipped

    skipped = run(tmp_path / "skipped", "--divergence.on-spike=skip", poisoned=bad)
    logged = records(tmp_path / "skipped")
    assert [record.step for record in logged if record.skipped] == [9]
    assert skipped.progress.samples == 14 * BATCH
