"""Early stopping and the best checkpoint, with the real trainer on real ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.checkpoint.settings import Retention
from distmp.config import EarlyStoppingConfig, RunConfig, load
from distmp.engine.evaluation import Evaluation
from distmp.errors import ConfigError, SetupError
from distmp.training.callbacks.callback import Rollback, SpikeAction
from distmp.training.callbacks.stopping import EarlyStopping
from distmp.training.trainer import Trainer
from distmp.utils.settings import from_mapping
from tests.ranks import ranks
from tests.toys import printed, trainer_of
from tests.training.test_resume import Samples, configuration

# Losses of the validations after steps 2, 4, 6, ...
LOSSES = (3.0, 2.0, 1.5, 1.6, 1.45, 1.7, math.nan, 1.0, 1.0, 1.0)
BEST = "best held-out loss 1.5 on 4 samples, at step 6"
WEIGHTS = "model.safetensors"
VALUES: dict[str, Any] = {
    "steps": 40,
    "validation": {"every": 2, "samples": 4},
    "checkpoint": {"every": 5, "keep": 1},
    "early_stopping": {"patience": 3, "min_delta": 0.1},
}


def trainer(directory: Path, losses: Sequence[float] = LOSSES, **values: Any) -> Trainer:
    """Return a trainer whose validations have these losses."""
    run = trainer_of(configuration(directory, **{**VALUES, **values}))

    def evaluate(batches: Any, metrics: Mapping[str, Any]) -> Evaluation:
        assert [*batches]
        return Evaluation(losses[run.progress.step // 2 - 1], {})

    run.engine.evaluate_metrics = evaluate  # type: ignore[method-assign]
    return run


def messages(run: Trainer) -> list[str]:
    """Train to the end, and return what is printed at it."""
    return printed(run, "best", "finished")


def checkpoints(run: Trainer) -> list[str]:
    return sorted(path.name for path in Path(str(run.directory.checkpoints)).iterdir())


@pytest.mark.nightly
@ranks(2, timeout=120)
def test_early_stop_ends_all_ranks_and_keeps_best(tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        directory = tmp_path / strategy
        run = trainer(directory, strategy=strategy)
        # 1.45 is not better than 1.5 by more than 0.1: 1.6, 1.45 and 1.7 do not improve.
        reason = (
            "loss has not improved on 1.5 at step 6 for 3 validations (early_stopping.patience)"
        )
        best = f"{BEST}: {run.directory.checkpoints / 'step-000006'}"
        assert messages(run) == [best, f"finished after step 12: {reason}"]
        assert run.progress.step == 12
        assert checkpoints(run) == ["step-000006", "step-000012"]
        # The run is finished, also for a job that resumes it.
        resumed = trainer(directory, strategy=strategy, resume="auto")
        assert messages(resumed) == [best, f"finished after step 12: {reason}"]
        assert resumed.progress.step == 12
        # With more patience it continues. NaN does not improve, 1.0 does.
        section = {"patience": 5, "min_delta": 0.1}
        longer = trainer(
            directory, strategy=strategy, resume="auto", early_stopping=section, steps=18
        )
        assert messages(longer) == [
            best.replace("1.5 on 4 samples, at step 6", "1 on 4 samples, at step 16").replace(
                "06", "16"
            )
        ]
        assert longer.progress.step == 18
        assert checkpoints(longer) == ["step-000016", "step-000018"]


def test_metric_that_is_never_a_number_is_reported(tmp_path: Path) -> None:
    run = trainer(tmp_path, [math.nan] * 3)
    (message,) = messages(run)
    assert (
        message == "finished after step 6: loss was NaN for 3 validations (early_stopping.patience)"
    )


@pytest.mark.nightly
@ranks(1)
def test_resumed_run_keeps_its_patience_count(tmp_path: Path) -> None:
    first = trainer(tmp_path / "run", steps=10)
    assert messages(first) == [f"{BEST}: {first.directory.checkpoints / 'step-000006'}"]
    path = first.directory.checkpoints / "step-000010"
    other = trainer(tmp_path / "other", resume=str(path))
    assert messages(other) == [
        f"{BEST}: no checkpoint in {other.directory.checkpoints}: an "
        "earlier run has it, or no save succeeded",
        "finished after step 12: loss has not improved on 1.5 at step 6 for 3 validations "
        "(early_stopping.patience)",
    ]
    resumed = trainer(tmp_path / "run", resume="auto")
    assert messages(resumed)[1].startswith("finished after step 12: ")


def spiking(
    directory: Path, monkeypatch: pytest.MonkeyPatch, spikes: list[int], **values: Any
) -> Trainer:
    """Train; go back at each of these steps. After the last one, step 6 is not the best."""
    losses = [3.0, 2.0, 1.0, *[2.5] * 8]
    values |= {"divergence": {"on_spike": "rollback"}, "early_stopping": {"patience": 9}}
    run = trainer(directory / "run", losses, **values)

    def action(numbers: Any, _: Any) -> SpikeAction | None:
        if numbers.applied_total not in spikes:
            return None
        spikes.pop()
        losses[2] = 1.0 if spikes else 2.5
        return SpikeAction("a spike", "rollback")

    monkeypatch.setattr("distmp.training.trainer.action_for", action)
    best = run.directory.checkpoints / "step-000004"
    assert messages(run) == [f"best held-out loss 2 on 4 samples, at step 4: {best}"]
    return run


@pytest.mark.nightly
@ranks(1)
def test_rollback_restores_previous_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Take back step 6, whose validation is the best.
    run = spiking(tmp_path, monkeypatch, [6], steps=14)
    assert checkpoints(run) == ["step-000004", "step-000014"]


@pytest.mark.nightly
@ranks(1)
def test_two_rollbacks_restore_earlier_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Take back step 8 twice: to step 6, whose validation is the best, and to step 5.
    run = spiking(tmp_path, monkeypatch, [8, 8], steps=16, checkpoint={"every": 5, "keep": 2})
    assert run.progress.rollbacks == 2
    assert checkpoints(run)[0] == "step-000004"


@pytest.mark.parametrize("patience", [0, 2])
@ranks(1)
def test_data_without_validation_samples_is_refused(patience: int, tmp_path: Path) -> None:
    settings = {"early_stopping": {"patience": patience}, "validation": {"every": 2}}
    data = {"source": f"{__name__}:training_data"}
    with pytest.raises((ConfigError, SetupError), match=r"validation\.every = 2: data\.source ret"):
        trainer(tmp_path / "run", data=data, **settings)


def training_data(split: str, sequence_length: int) -> Samples | None:
    return Samples(False, 1.0) if split == "train" else None


class Watched:
    """What `EarlyStopping` uses of a trainer."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.progress = self
        self.step = 0
        self.kept = 0
        self.reason: str | None = None

    def keep(self, step: int, *, save: bool = False) -> None:
        self.kept = step

    def finish_early(self, reason: str) -> None:
        self.reason = reason


@given(
    values=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25, 2.0, math.nan, math.inf]), max_size=12),
    patience=st.integers(1, 3),
    min_delta=st.sampled_from([0.0, 0.25]),
    maximizes=st.booleans(),
    resumed_at=st.integers(0, 12),
)
def test_patience_agrees_with_definition(
    values: list[float], patience: int, min_delta: float, maximizes: bool, resumed_at: int
) -> None:
    """Also if the run is resumed, from a checkpoint after any validation."""
    mode = "max" if maximizes else "min"
    config = configuration(
        Path("unused"),
        validation={"every": 1, "samples": 4},
        early_stopping={"patience": patience, "min_delta": min_delta, "mode": mode},
    )
    watched: Any = Watched(config)
    stopping = EarlyStopping(config, watched, None)
    best, best_step, since = None, 0, 0
    for step, value in enumerate(values, 1):
        if step == resumed_at:
            state, stopping = stopping.state_dict(), EarlyStopping(config, watched, None)
            watched.kept = 0
            stopping.load_state_dict(state)
        watched.step = step
        stopping.on_validation(watched, value, {})
        sign = 1 if maximizes else -1
        if not math.isnan(value) and (best is None or sign * (value - best) > min_delta):
            best, best_step, since = value, step, 0
        else:
            since += 1
        assert watched.kept == best_step
        assert (watched.reason is not None) == (since >= patience)
        if watched.reason is not None:
            break


def stopping_after(value: float, **early_stopping: Any) -> tuple[EarlyStopping, Any]:
    """Return the state after one validation, in step 4."""
    section = {"patience": 2, **early_stopping}
    watched: Any = Watched(configuration(Path("unused"), early_stopping=section, **EVERY_STEP))
    stopping = EarlyStopping(watched.config, watched, None)
    watched.step = 4
    stopping.on_validation(watched, value, {"accuracy": value})
    return stopping, watched


DROPPED = "early stopping: {}; the best value so far, and its checkpoint, are no longer kept"
EVERY_STEP: dict[str, Any] = {"validation": {"every": 1, "metrics": {"accuracy": "accuracy"}}}


@pytest.mark.parametrize(
    ("before", "changed"),
    [
        (
            {"metric": "accuracy"},
            "early_stopping.metric accuracy -> loss, early_stopping.mode max -> min",
        ),
        ({"mode": "max"}, "early_stopping.mode max -> min"),
    ],
)
def test_values_of_another_metric_are_not_compared(
    before: dict[str, str], changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    other, _ = stopping_after(0.5, **before)
    stopping, watched = stopping_after(math.nan)
    stopping.load_state_dict(other.state_dict())
    assert watched.kept == 0
    assert caplog.messages == [DROPPED.format(changed)]
    watched.step = 5
    stopping.on_validation(watched, 2.0, {})
    assert watched.kept == 5


@pytest.mark.parametrize(
    ("other", "changed"),
    [
        ({"validation": {"every": 1, "samples": 8}}, "validation.samples 4 -> 8"),
        ({"data": {"validation_path": "b"}}, "data.validation_path a -> b"),
    ],
)
def test_values_of_other_held_out_data_are_not_compared(
    other: dict[str, Any], changed: str, caplog: pytest.LogCaptureFixture
) -> None:
    base: dict[str, Any] = {
        "early_stopping": {"patience": 2},
        "validation": {"every": 1, "samples": 4},
        "data": {"source": "text", "validation_path": "a"},
    }
    state: dict[str, Any] = {}
    for step, changes in ((1, {}), (2, other)):
        watched: Any = Watched(from_mapping(RunConfig, base | changes))
        stopping = EarlyStopping(watched.config, watched, None)
        stopping.load_state_dict(state)
        watched.step = step
        stopping.on_validation(watched, float(step), {})
        state = stopping.state_dict()
        assert watched.kept == step
    assert caplog.messages == [DROPPED.format(changed)]


def test_more_samples_than_there_are_make_no_other_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state: dict[str, Any] = {}
    for samples in (128, 256):
        values = {"early_stopping": {"patience": 2}, "validation": {"every": 1, "samples": samples}}
        watched: Any = Watched(from_mapping(RunConfig, values))
        stopping = EarlyStopping(watched.config, watched, 100)
        if state:
            stopping.load_state_dict(state)
        else:
            watched.step = 4
            stopping.on_validation(watched, 1.0, {})
        state = stopping.state_dict()
        assert watched.kept == 4
    assert not caplog.messages


def test_rollback_to_checkpoint_without_values_counts_from_the_start() -> None:
    stopping, watched = stopping_after(1.0)
    stopping.on_rollback(watched, Rollback(5, 4, "a spike", 8))
    assert watched.kept == 4
    stopping.on_rollback(watched, Rollback(5, 3, "a spike", 8))
    assert watched.kept == 0
    stopping.on_validation(watched, 2.0, {})
    assert watched.kept == 4


@pytest.mark.parametrize(
    ("held_out", "final", "counts"),
    [
        (100, None, True),
        (100, 150, True),
        (100, 50, False),
        (None, None, False),
        (200, None, False),
    ],
)
def test_last_validation_counts_if_it_has_as_many_samples(
    held_out: int | None, final: int | None, counts: bool
) -> None:
    config = configuration(
        Path("unused"),
        validation={"every": 1, "samples": 128, "final_samples": final},
        early_stopping={"patience": 1},
    )
    watched: Any = Watched(config)
    watched.step = config.steps
    EarlyStopping(config, watched, held_out).on_validation(watched, 1.0, {})
    assert watched.kept == (config.steps if counts else 0)


def test_retention_keeps_only_best_in_addition() -> None:
    for best, expected in (
        ({7: 3}, [1, 2, 4, 5]),
        ({6: 3, 7: 3}, [1, 2, 4, 5]),
        ({6: 3, 7: 7}, [1, 2, 4, 5]),  # a rollback to 6 needs 3
        ({5: 3, 6: 6, 7: 6}, [1, 2, 3, 4, 5]),
        ({7: 9}, [1, 2, 3, 4, 5]),
        ({2: 2, 4: 4, 5: 4, 7: 9}, [1, 2, 3, 5]),  # the save of step 9 failed
    ):
        assert Retention(last=2).surplus(range(1, 8), (), best) == expected


PATIENCE, EVERY = "--early-stopping.patience=2", "--validation.every=5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--early-stopping.patience=-1"], "early_stopping.patience = -1: use 0 or more"),
        (
            [PATIENCE],
            "early_stopping.patience = 2: needs validations during training; set validation.every",
        ),
        (
            [PATIENCE, EVERY, "--early-stopping.metric=los"],
            "early_stopping.metric = 'los': did you mean 'loss'?",
        ),
        (
            [PATIENCE, EVERY, "--early-stopping.metric=ema_loss"],
            "early_stopping.metric = 'ema_loss': needs an average of the weights; set ema.decay",
        ),
        (
            [PATIENCE, EVERY, "--early-stopping.metric=f1", "--validation.metrics={f1: accuracy}"],
            "early_stopping.mode = 'auto': does not know the metric 'f1'; set min or max",
        ),
        (
            ["--validation.metrics={p: perplexity}", "--model.loss=json:dumps"],
            "validation.metrics = 'perplexity': is the exponential of the loss next_token",
        ),
        (["--validation.metrics={p: 3}"], "validation.metrics.p = 3: "),
        (["--early-stopping.metric=ema_loss"], "early_stopping.metric = 'ema_loss': has no effect"),
    ],
)
def test_settings_that_never_stop_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(arguments)
    assert str(caught.value).startswith(message)


def test_direction_follows_known_metrics() -> None:
    directions = {
        name: EarlyStoppingConfig(metric=name).maximizes
        for name in ("loss", "ema_loss", "perplexity", "accuracy", "ema_accuracy")
    }
    assert [name for name, maximizes in directions.items() if maximizes] == [
        "accuracy",
        "ema_accuracy",
    ]
