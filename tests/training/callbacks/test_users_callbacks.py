"""Callbacks that users write: what the loop calls, with which numbers, and how errors end a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from distmp.config import load
from distmp.distributed.progress import current_phase
from distmp.distributed.stopping import StopSignals
from distmp.engine.setup import EngineSetup
from distmp.errors import ConfigError
from distmp.train import main
from distmp.training.callbacks import Callback, PendingStep, Rollback, StepResult, TrainingLoop
from distmp.training.callbacks.order import check_hooks, load_callbacks
from distmp.training.trainer import Trainer
from distmp.utils.imports import parse_entries
from tests.elastic import Job, run_jobs
from tests.marks import nightly
from tests.ranks import ranks
from tests.toys import BATCH, STEPS, Points, regression_run, trainer_of

# A step whose gradients are not finite, which is skipped, and one that is out of bounds.
SKIPPED, SPIKE, CHECKPOINT = 4, 8, 6


def dataset(split: str, sequence_length: int) -> Points | None:
    """Return points of which one sample of two steps is far off."""
    far_off = {(SKIPPED - 1) * BATCH: float("inf"), (SPIKE - 1) * BATCH: 1e4}
    return Points(far_off) if split == "train" else None


def squared(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    # An infinite target is left out of the loss, but its gradient is 0 * inf.
    squares = (module(batch["inputs"]) - batch["targets"]).square()
    return squares.where(batch["targets"].isfinite(), 0.0).sum(), len(batch["inputs"])


class Recorder(Callback):
    """Notes every call. `stop_after` asks the last rank to stop."""

    def __init__(self, name: str, stop_after: int = STEPS) -> None:
        self.name, self.stop_after = name, stop_after
        self.results: list[StepResult] = []
        self.calls: list[str] = []

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        self.calls.append("train begin")

    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        assert step == trainer.progress.step + 1
        self.calls.append(f"begin {step}")

    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        assert step.step == trainer.progress.step
        self.calls.append(f"launched {step.step}")

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        # What a hang report names.
        assert current_phase.now.phase == f"on_step_end of callback {type(self).__name__}"
        order.append(self.name)
        self.results.append(result)
        self.calls.append(f"end {result.step}")

    def on_save(self, trainer: TrainingLoop, step: int, seconds: float) -> None:
        self.calls.append(f"save {step}")

    def on_rollback(self, trainer: TrainingLoop, rollback: Rollback) -> None:
        self.calls.append(f"rollback {rollback.from_step} {rollback.to_step}")

    def stop_reason(self, trainer: TrainingLoop) -> str | None:
        last_rank = trainer.world.rank == trainer.world.world_size - 1
        reached = last_rank and trainer.progress.step >= self.stop_after
        return reached and "enough"  # type: ignore[return-value]  # False is no reason, too

    def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
        self.calls.append(f"train end {finished}")

    def on_exit(self, trainer: TrainingLoop, error: BaseException | None) -> None:
        self.calls.append(f"exit {error!r}")


order: list[str] = []
configured: list[Recorder] = []


def recorder() -> Recorder:
    """What the configuration names."""
    configured.append(Recorder("configuration"))
    return configured[-1]


def trainer(directory: Path, *arguments: str, callbacks: tuple[Callback, ...] = ()) -> Trainer:
    fixed = (f"--run-dir={directory / 'run'}", "--divergence.on-spike=rollback")
    options = regression_run(__name__, *fixed, "--log.console=off", *arguments)
    return trainer_of(load(options), *callbacks)


def launched_steps(run: Trainer) -> list[tuple[int, str]]:
    """Return a list that gets the number of each step and its numbers, as the engine has them."""
    step, launched = run.engine.step, []

    def stepped(*arguments: Any, **options: Any) -> Any:
        outcome = step(*arguments, **options)
        launched.append((run.progress.step + 1, repr(outcome.numbers)))
        return outcome

    run.engine.step = stepped  # type: ignore[method-assign]
    return launched


@pytest.mark.parametrize("late", [False, nightly(True)], ids=["read at once", "read a step later"])
@pytest.mark.parametrize("world_size", [1, 2])
@ranks(timeout=100)
def test_callback_gets_every_step_once_in_order(
    world_size: int, late: bool, tmp_path: Path
) -> None:
    """With a skipped step, a rollback, a stop and a resumed run."""
    if late:  # as on a GPU
        EngineSetup.host_waits = property(lambda self: False)  # type: ignore[assignment, method-assign]
    configuration = f"--callbacks={__name__}:recorder"
    python = Recorder("Python", stop_after=11)
    stopped = trainer(tmp_path, configuration, callbacks=(python,))
    launched = launched_steps(stopped)
    assert not stopped.run(StopSignals())
    last = stopped.progress.step
    assert 11 < last < STEPS
    # The step that was launched after the spike was discarded before anybody read it.
    discarded = [SPIKE + 1] if late else []
    expected = [*range(1, SPIKE + 1), *range(CHECKPOINT + 1, last + 1)]
    assert [step for step, _ in launched] == [*expected[:SPIKE], *discarded, *expected[SPIKE:]]
    if late:
        del launched[SPIKE]
    resumed = trainer(tmp_path, configuration, "--resume=auto", callbacks=(python,))
    python.stop_after = STEPS
    later = launched_steps(resumed)
    assert resumed.run(StopSignals())
    both = [*launched, *later]
    assert [step for step, _ in both] == [*expected, *range(last + 1, STEPS + 1)]
    assert [(r.step, repr(r.numbers)) for r in python.results] == both
    first, second = configured
    assert [(r.step, repr(r.numbers)) for r in (*first.results, *second.results)] == both
    assert order == ["configuration", "Python"] * len(both)
    skipped = [result.step for result in python.results if result.numbers.skipped]
    assert skipped == [SKIPPED]
    assert [result.step for result in python.results if result.rolls_back] == [SPIKE]


@pytest.mark.parametrize("world_size", [1, nightly(2)])
@ranks(timeout=100)
def test_hooks_are_called_in_order(world_size: int, tmp_path: Path) -> None:
    python = Recorder("Python")
    run = trainer(tmp_path, "--checkpoint.no-asynchronous", "--steps=10", callbacks=(python,))
    assert run.run(StopSignals())

    def steps(first: int, last: int) -> list[str]:
        return [
            call
            for step in range(first, last + 1)
            for call in (
                f"begin {step}",
                f"launched {step}",
                f"end {step}",
                *([f"save {step}"] if step % 3 == 0 else []),
            )
        ]

    assert "; ".join(python.calls) == "; ".join(
        [
            "train begin",
            # A rollback may need a checkpoint of the start.
            "save 0",
            *steps(1, SPIKE),
            f"rollback {SPIKE} {CHECKPOINT}",
            # The position behind the data that was skipped is saved at once.
            f"save {CHECKPOINT}",
            *steps(CHECKPOINT + 1, 10),
            "save 10",
            "train end True",
            "exit None",
        ]
    )


class Failing(Recorder):
    def __init__(self) -> None:
        super().__init__("failing")

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        if result.step == 3 and trainer.world.rank == trainer.world.world_size - 1:
            raise ArithmeticError("the callback failed")


@ranks(1)
def test_every_callback_exits_after_error(tmp_path: Path) -> None:
    failing, other = Failing(), Recorder("other")

    class ExitFails(Callback):
        def on_exit(self, trainer: TrainingLoop, error: BaseException | None) -> None:
            raise KeyError("exit")

    run = trainer(tmp_path, callbacks=(failing, ExitFails(), other))
    with pytest.raises(KeyError, match="exit") as caught:
        run.run(StopSignals())
    assert isinstance(caught.value.__context__, ArithmeticError)
    assert failing.calls[-1] == "exit ArithmeticError('the callback failed')"
    assert other.calls[-1] == "exit KeyError('exit')"
    assert not any(call.startswith("train end") for call in other.calls)


@ranks(1)
def test_error_at_end_loses_no_checkpoint(tmp_path: Path) -> None:
    class EndFails(Callback):
        def on_train_end(self, trainer: TrainingLoop, *, finished: bool) -> None:
            raise ArithmeticError("the callback failed")

    run = trainer(tmp_path, "--checkpoint.every=0", "--steps=3", callbacks=(EndFails(),))
    with pytest.raises(ArithmeticError):
        run.run(StopSignals())
    assert (run.directory.checkpoints / "step-000003").is_dir()


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_callback_error_on_one_rank_ends_all(tmp_path: Path) -> None:
    options = regression_run(__name__, "--steps=20000", f"--callbacks={__name__}:Failing")
    (done,) = run_jobs([Job(options)], tmp_path)
    assert done.exit_codes[1] == 1
    assert done.stderr.count("rank 1 of 2 failed:\n") == 1, done.stderr
    assert done.stderr.count("ArithmeticError: the callback failed") == 1
    assert "rank 0 of 2 failed" not in done.stderr


NOT_CALLABLE = 3


def nothing() -> None:
    """Forgets to return a callback."""


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("callback", "write an import path as 'package.module:attribute'"),
        ("no_such_module:Callback", "there is no module 'no_such_module' on the Python path"),
        (f"{__name__}:Missing", f"module '{__name__}' has no 'Missing'"),
        (f"{__name__}:NOT_CALLABLE", "is a int; name a function or a class"),
    ],
)
def test_path_without_callback_is_one_message(path: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_callbacks(parse_entries("callbacks", [f"{__name__}:recorder", path]))
    assert str(caught.value) == f"callbacks = {path!r}: {problem}"


def test_function_that_returns_no_callback_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^callbacks = None: is no .*Callback; give"):
        check_hooks(load_callbacks(parse_entries("callbacks", [f"{__name__}:nothing"])))


def test_wrong_callback_path_is_refused_before_training(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--callbacks", f"{__name__}:recorder", "no_such_module:Callback"]) == 2
    assert capsys.readouterr().err == (
        "distmp: callbacks = 'no_such_module:Callback': there is no module 'no_such_module' on "
        "the Python path\n"
    )
    assert not (cwd / "runs").exists()
