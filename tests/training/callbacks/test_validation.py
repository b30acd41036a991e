"""What a run prints about its validations, with the real trainer on real ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import Subset

from distmp.config import load
from distmp.distributed.stopping import StopSignals
from distmp.errors import ConfigError
from distmp.telemetry.records import read_records
from distmp.training.callbacks.callback import Callback, TrainingLoop
from distmp.training.callbacks.validation import loss_unit, weight_unit
from distmp.training.trainer import Trainer
from tests.ranks import ranks
from tests.toys import finished, printed, trainer_of
from tests.training.test_resume import SIZE, Samples, configuration


@ranks(2)
def test_only_final_validation_is_announced(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": 1, "samples": 4, "final_samples": 6}
    run = trainer_of(configuration(tmp_path / "some", steps=3, validation=options))
    lines = printed(run, "validat", "held-out")
    assert [line.split(" loss")[0] for line in lines] == [
        "validating on the held-out samples",
        "held-out",
    ]


def fails(output: Any, batch: Any) -> Any:
    raise ValueError("a metric of somebody")


def test_metric_that_fails_does_so_before_training(tmp_path: Path) -> None:
    metrics = {"metrics": {"own": f"{__name__}:fails"}}
    run = trainer_of(configuration(tmp_path / "some", steps=3, validation=metrics))
    with pytest.raises(ValueError, match="a metric of somebody"):
        run.run(StopSignals())
    assert run.progress.step == 0


def validation_of_rank(split: str, sequence_length: int, last: int) -> Any:
    size = last if dist.get_rank() else 5
    return Subset(Samples(False, 1.0), range(SIZE) if split == "train" else range(size - 5, size))


@ranks(2)
def test_other_held_out_samples_on_ranks_are_refused(tmp_path: Path) -> None:
    for last in (6, 20):
        data = {"source": f"{__name__}:validation_of_rank", "options": {"last": last}}
        run = trainer_of(configuration(tmp_path / str(last), steps=3, data=data))
        with pytest.raises(ConfigError, match=r"\(validation\) = 5 samples .* read different data"):
            run.run(StopSignals())


class InOrder(Callback):
    """Lists the beginning and validations of a run."""

    def __init__(self) -> None:
        self.called: list[str | int] = []

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        self.called.append("begin")

    def on_validation(
        self, trainer: TrainingLoop, loss: float, metrics: Mapping[str, float]
    ) -> None:
        self.called.append(trainer.progress.step)


def run_with_validations(
    directory: Path, at_last: Callable[[int], object], *callbacks: Callback, **more: Any
) -> Trainer:
    """Return a run that calls a function with its step before each evaluation."""
    options = {"steps": 6, "validation": {"every": 2}, **more}
    run = trainer_of(configuration(directory / "run", resume="auto", **options), *callbacks)
    evaluate = run.engine.evaluate_metrics

    def evaluated(batches: Any, metrics: Any) -> Any:
        at_last(run.progress.step)
        return evaluate(batches, metrics)

    run.engine.evaluate_metrics = evaluated  # type: ignore[method-assign]
    return run


def validated(run: Trainer) -> list[int]:
    records = read_records(run.directory.records)
    return [record.step for record in records if record.validation_loss is not None]


def test_run_is_saved_before_its_last_validation(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        if step == 6:
            raise ValueError("a damaged sample")

    failed = run_with_validations(tmp_path, fail)
    with pytest.raises(ValueError, match="a damaged sample"):
        failed.run(StopSignals())
    assert validated(failed) == [2, 4]
    resumed = run_with_validations(tmp_path, str)
    assert resumed.progress.step == 6
    assert validated(finished(resumed)) == [2, 4, 6]
    # A longer run validates this step as one that has not ended there.
    order = InOrder()
    finished(run_with_validations(tmp_path, str, order, steps=7))
    assert order.called == ["begin", 6, 7]
    # Only early stopping needs it if its step is no multiple of `every`.
    for steps, patience, expected in ((9, 0, [8, 9]), (11, 5, [9, 10, 11])):
        order, stopping = InOrder(), {"early_stopping": {"patience": patience}}
        finished(run_with_validations(tmp_path, str, order, steps=steps, **stopping))
        assert order.called == ["begin", *expected]


def test_interrupted_validation_is_repeated(tmp_path: Path) -> None:
    stop = StopSignals()

    def interrupt(step: int) -> None:
        stop.received = signal.SIGTERM if step == 4 else None

    stopped = run_with_validations(tmp_path, interrupt)
    assert not stopped.run(stop)
    assert validated(stopped) == [2]
    order = InOrder()
    assert validated(finished(run_with_validations(tmp_path, str, order))) == [2, 4, 6]
    assert order.called == ["begin", 4, 6]


# The unit of the weight that losses and throughputs are reported with.


OWN = "--model.loss=my_model:loss"
TOKENS = ["--data.source=tokens", "--data.path=tokens.bin"]


@pytest.mark.parametrize(
    ("arguments", "weight", "unit", "of_loss"),
    [
        ([], 4096, "token", " nats per byte"),
        (TOKENS, 4096, "token", " nats per token"),
        ([OWN], 32, "sample", ""),
        ([OWN], 30, "sample", ""),  # two samples are masked
        ([OWN], 4096, "unit", ""),
    ],
)
def test_units_follow_loss_function(
    arguments: list[str], weight: int, unit: str, of_loss: str
) -> None:
    config = load(["--batch.global-batch-size=32", *arguments])
    assert weight_unit(config, weight) == unit
    assert loss_unit(config) == of_loss
