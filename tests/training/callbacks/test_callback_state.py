"""State of callbacks in checkpoints, and callbacks with arguments, with the real trainer."""

from __future__ import annotations

import copy
import logging
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import load
from distmp.distributed.progress import current_phase
from distmp.distributed.stopping import StopSignals
from distmp.errors import ConfigError, SetupError
from distmp.launcher.command import main as launch
from distmp.training.callbacks import Callback, PendingStep, StepResult, TrainingLoop
from distmp.training.callbacks.order import load_callbacks
from distmp.training.trainer import Trainer
from distmp.utils.dtypes import local_values
from distmp.utils.imports import parse_entries
from tests.ranks import ranks, run_ranks
from tests.reference import assert_same_bits, gathered, snapshot
from tests.toys import finished, printed, trainer_of
from tests.training.test_resume import configuration


class History(Callback):
    """Keeps small values, a tensor that grows, and a sharded sum of the weights."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.losses: list[float] = []
        self.rates = torch.zeros(0, dtype=torch.float64)
        self.sums: dict[str, Tensor] = {}
        self.calls: list[str] = []

    def setup(self, trainer: TrainingLoop) -> None:
        self.calls.append("setup")
        self.sums = copy.deepcopy(trainer.engine.weights())

    def state_dict(self) -> dict[str, Any]:
        sums = {f"sum/{name}": value for name, value in self.sums.items()}
        return {"losses": self.losses, "rates": self.rates, **sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.losses, self.rates = state["losses"], state["rates"]
        for name, value in self.sums.items():
            local_values(value).copy_(local_values(state[f"sum/{name}"]))

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        self.calls.append(f"on_train_begin {len(self.losses)}")

    @torch.no_grad()
    def on_step_launched(self, trainer: TrainingLoop, step: PendingStep) -> None:
        for name, weights in trainer.engine.weights().items():
            local_values(self.sums[name]).add_(local_values(weights), alpha=self.factor)

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        self.losses = [*self.losses, result.numbers.loss]
        rate = torch.tensor([result.numbers.learning_rate], dtype=torch.float64)
        self.rates = torch.cat([self.rates, rate])


class Other(Callback):
    """A callback of another run."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"a": 1}


HISTORY = {"name": f"{__name__}:History", "options": {"factor": 0.5}}
COMMON: dict[str, Any] = {
    "steps": 8,
    "checkpoint": {"every": 4, "keep": 3},
    "callbacks": [HISTORY, f"{__name__}:History"],
    "ema": {"decay": 0.9},
    "validation": {"every": 2, "samples": 4, "metrics": {"right": "accuracy"}},
    "early_stopping": {"metric": "ema_loss", "patience": 100},
}
CASES: dict[str, dict[str, Any]] = {
    "fsdp, fp16, overflows": {
        "strategy": "fsdp",
        "precision": {"policy": "fp16", "loss_scale": {"init": 2.0**24}},
    },
    "sharded optimizer, bf16": {"shard_optimizer": True, "precision": {"policy": "bf16"}},
}


def trainer(directory: Path, *users: Callback, **values: Any) -> Trainer:
    return trainer_of(configuration(directory, **{**COMMON, **values}), *users)


def state(run: Trainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return copies of the whole tensors of all callbacks, and their other values."""
    return gathered(run.states.tensors()), run.states.numbers()


@pytest.mark.nightly
@ranks(2, timeout=150)
def test_resumed_callback_states_agree_with_uninterrupted_run(tmp_path: Path) -> None:
    for number, values in enumerate(CASES.values()):
        first, second = tmp_path / f"{number}", tmp_path / f"{number}-resumed"
        whole = finished(trainer(first, **values))
        if "fp16" in str(values):
            assert int(whole.engine.step_counts[1])  # skipped
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.copytree(first, second)
            for path in (second / "checkpoints").iterdir():
                if path.name > "step-000004":
                    shutil.rmtree(path)
        dist.barrier()
        resumed = finished(trainer(second, **values, resume="auto"))
        assert _history(resumed).calls == ["setup", "load_state_dict", "on_train_begin 4"]
        assert _history(whole).factor == 0.5
        tensors, numbers = state(whole)
        found, found_numbers = state(resumed)
        assert_same_bits(found, tensors)
        assert found_numbers == numbers
        assert len(numbers["callbacks"]["History {}"]["losses"]) == 8
        assert tensors['callbacks/History {"factor": 0.5}/rates'].shape == (8,)
        assert_same_bits(snapshot(resumed.engine), snapshot(whole.engine))


def _history(run: Trainer) -> History:
    return next(callback for callback in run.callbacks if isinstance(callback, History))


def train_and_return(directory: Path, values: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Train on these ranks, and return the states of callbacks."""
    return state(finished(trainer(directory, **values)))


def load_and_return(directory: Path, values: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """Resume a finished run on these ranks, and return the states of callbacks."""
    run = trainer(directory, **values, resume="auto")
    with run.active(StopSignals()):
        return state(run)


@pytest.mark.nightly
def test_states_load_at_other_world_size(tmp_path: Path) -> None:
    values = CASES["sharded optimizer, bf16"]
    expected = run_ranks(train_and_return, 2, tmp_path / "run", values)[0]
    for world_size, strategy in ((1, {}), (4, {"strategy": "fsdp"})):
        changed = {**strategy, "precision": values["precision"]}
        for tensors, numbers in run_ranks(load_and_return, world_size, tmp_path / "run", changed):
            assert_same_bits(tensors, expected[0])
            found, whole = numbers["callbacks"], expected[1]["callbacks"]
            # The last validation comes after the last save, and is repeated.
            assert found.pop("Validation") == {"step": 6, "end": 8}
            assert whole["Validation"] == {"step": 8, "end": 8}
            assert found.pop("EarlyStopping")["last_step"] == 6
            assert found.items() <= whole.items()


@pytest.mark.nightly
@ranks(1)
def test_checkpoint_with_other_callbacks_loads_with_one_message(tmp_path: Path) -> None:
    def resumed(**values: Any) -> str:
        lines = printed(trainer(tmp_path / "run", **values, resume="auto"), "")
        return "; ".join(line for line in lines if "(callbacks)" in line)

    none: dict[str, Any] = {"callbacks": [], "ema": {}, "early_stopping": {}}
    finished(trainer(tmp_path / "run", **{**none, "steps": 3}))
    checkpoints = tmp_path / "run" / "checkpoints"
    assert resumed(**none, steps=4) == ""
    assert resumed(steps=5, ema={}, early_stopping={}, callbacks=[HISTORY]) == (
        f"{checkpoints / 'step-000004'}: the checkpoint has no state of History, which starts "
        "from scratch (callbacks)"
    )
    other = {**none, "callbacks": [f"{__name__}:Other"], "ema": {"decay": 0.5}}
    assert resumed(**{**other, "steps": 6}) == (
        f"{checkpoints / 'step-000005'}: the checkpoint has no state of Ema, Other, which starts "
        "from scratch and has the state of History, which this run does not have (callbacks)"
    )
    assert resumed(**{**other, "steps": 7}) == ""
    assert resumed(**none, steps=8) == (
        f"{checkpoints / 'step-000007'}: the checkpoint has the state of Ema, Other, which this "
        "run does not have (callbacks)"
    )


class Limit(Callback):
    """Stores the path that it was built with."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.loaded = ""

    def state_dict(self) -> dict[str, Any]:
        return {"path": self.path}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["path"]


@ranks(1)
def test_states_of_one_class_follow_reordered_callbacks(tmp_path: Path) -> None:
    entries = [{"name": f"{__name__}:Limit", "options": {"path": path}} for path in ("a/b", "c")]
    values = {"ema": {}, "early_stopping": {}, "validation": {}}
    finished(trainer(tmp_path / "run", **values, steps=3, callbacks=entries))
    again = {**values, "steps": 4, "callbacks": entries[::-1], "resume": "auto"}
    resumed = finished(trainer(tmp_path / "run", **again))
    loaded = [callback.loaded for callback in resumed.callbacks if isinstance(callback, Limit)]
    assert loaded == ["c", "a/b"]


class Bad(Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


class Numbered(Callback):
    def state_dict(self) -> dict[Any, Any]:
        return {0: torch.zeros(2)}


@ranks(1)
def test_tensors_without_a_name_are_refused_before_training(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", Numbered())
    with pytest.raises((ConfigError, SetupError), match=r"callback Numbered = .* string keys"):
        run.run(StopSignals())
    assert run.progress.step == 0


@ranks(1)
def test_state_changed_by_json_is_refused_before_training(tmp_path: Path) -> None:
    for number, value in enumerate(({1: 2}, (1, 2), object(), {1, 2})):
        run = trainer(tmp_path / str(number), Bad(value))
        with pytest.raises((ConfigError, SetupError)) as caught:
            run.run(StopSignals())
        assert "state_dict() of callback Bad = " in str(caught.value)
        assert "cannot be stored as it is" in str(caught.value)
        assert "use tensors, or numbers, strings, None, lists, and dictionaries" in str(
            caught.value
        )
        assert run.progress.step == 0


@pytest.mark.nightly
@ranks(1)
def test_invalid_callback_state_does_not_prevent_checkpoint(tmp_path: Path) -> None:
    class Later(Bad):
        def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
            self.value = (1, 2)

    lines: list[str] = []
    logger = logging.getLogger("distmp")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    run = finished(trainer(tmp_path / "run", Later(1), callbacks=[]))
    logger.removeHandler(handler)
    found = [line for line in lines if "is not saved" in line]
    assert found
    assert found[0].startswith("state_dict() of callback Later is not saved: {'value': (1, 2)} ")
    numbers = StoredCheckpoint(run.directory.checkpoints / "step-000008").state.numbers
    assert [*numbers["callbacks"]] == ["Validation", "EarlyStopping"]


class Old(Callback):
    def on_validation(self, trainer: TrainingLoop, loss: float) -> None:  # type: ignore[override]
        """The signature of version 0.1."""


@ranks(1)
def test_hook_with_wrong_parameters_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, SetupError)) as caught:
        trainer(tmp_path / "run", Old())
    assert str(caught.value) == (
        "callbacks = 'Old': its on_validation has other parameters; define on_validation(self, "
        "trainer, loss, metrics)"
    )


@ranks(1)
def test_misspelled_hook_is_refused_before_training(tmp_path: Path) -> None:
    class Misspelt(Callback):
        def on_step_ended(self, trainer: TrainingLoop, result: StepResult) -> None:
            """Is never called."""

    with pytest.raises(
        (ConfigError, SetupError), match=r"= 'Misspelt': is no distmp.training.callbacks.Callback"
    ):
        trainer(tmp_path / "run", Misspelt)  # type: ignore[arg-type]
    # An address differs between ranks, which would print a message each.
    with pytest.raises((ConfigError, SetupError), match=r"^callbacks = 'object': is no "):
        trainer(tmp_path / "run", object())  # type: ignore[arg-type]
    with pytest.raises(
        (ConfigError, SetupError), match=r"on_step_ended is not a hook, .*'on_step_end'"
    ):
        trainer(tmp_path / "run", Misspelt())


@ranks(1)
def test_state_other_than_dict_is_refused_before_training(tmp_path: Path) -> None:
    class Empty(Callback):
        def state_dict(self) -> Any:
            return None

    with pytest.raises((ConfigError, SetupError)) as caught:
        trainer(tmp_path / "run", Empty()).run(StopSignals())
    assert str(caught.value) == "state_dict() of callback Empty = 'NoneType': return a dict"


class Draws(Callback):
    """Draws random numbers before each step, more of them before later steps."""

    def __init__(self) -> None:
        self.drawn: dict[int, float] = {}

    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        self.drawn[step] = torch.rand(step).sum().item() + random.random()


@ranks(1)
def test_callback_draws_the_same_before_steps_of_a_resumed_run(tmp_path: Path) -> None:
    small: dict[str, Any] = {"callbacks": [], "ema": {}, "early_stopping": {}}
    small["schedule"] = {"warmup_steps": 1}
    first, second, whole = Draws(), Draws(), Draws()
    finished(trainer(tmp_path / "run", first, **small, steps=2))
    finished(trainer(tmp_path / "run", second, **small, steps=4, resume="auto"))
    finished(trainer(tmp_path / "whole", whole, **small, steps=4))
    assert first.drawn | second.drawn == whole.drawn
    assert len({*whole.drawn.values()}) == 4


class Phases(Callback):
    """Notes what a hang report would name."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def setup(self, trainer: TrainingLoop) -> None:
        self.seen.append(str(current_phase.now))

    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        self.seen.append(str(current_phase.now))

    def on_validation(
        self, trainer: TrainingLoop, loss: float, metrics: Mapping[str, float]
    ) -> None:
        self.seen.append(f"{current_phase.now} {[*metrics]}")

    def on_exit(self, trainer: TrainingLoop, error: BaseException | None) -> None:
        self.seen.append(str(current_phase.now))


@ranks(1)
def test_hang_report_names_hook_and_step(tmp_path: Path) -> None:
    current_phase.restart()
    phases = Phases()
    finished(trainer(tmp_path / "run", phases, callbacks=[], steps=2, schedule={"warmup_steps": 1}))
    assert phases.seen == [
        "setup of callback Phases",
        "step 1, on_step_begin of callback Phases",
        "step 2, on_step_begin of callback Phases",
        "step 2, on_validation of callback Phases ['right', 'ema_loss', 'ema_right']",
        "step 2, on_exit of callback Phases",
    ]


class Fails(Callback):
    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        raise ArithmeticError


@ranks(1)
def test_error_leaves_the_phase_in_which_it_was_raised(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        finished(trainer(tmp_path / "run", Fails(), Phases(), callbacks=[]))
    assert str(current_phase.now).endswith("on_step_begin of callback Fails")


OPTIONS = f"{{name: {__name__}:History, options: {{factor: 3.0}}}}"


def test_callbacks_are_built_from_command_line() -> None:
    config = load(["--callbacks", f"{__name__}:Other", OPTIONS])
    other, history = load_callbacks(parse_entries("callbacks", config.callbacks))
    assert isinstance(other, Other)
    assert isinstance(history, History)
    assert history.factor == 3.0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("json:dumps", "cannot be called with the options {} (missing a required argument: 'obj')"),
        ("json:decoder", "is a module; name a function or a class"),
        ("no_such_module:A", "there is no module 'no_such_module' on the Python path"),
        (
            OPTIONS.replace("factor", "factr"),
            "cannot be called with the options {'factr': 3.0} (got an unexpected keyword argument",
        ),
        ("{name: 3}", "must be text; put it in quotes"),
        ("{nam: json:dumps}", "unknown setting; did you mean 'callbacks[0].name'?"),
        ("{options: {}}", "write an import path as 'package.module:attribute'"),
        ("{name: json:dumps, options: [1]}", "must be a section of 'name: value' lines"),
    ],
)
def test_invalid_callback_entry_is_refused_before_ranks_start(entry: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(["--nproc-per-node", "2", "--", "--callbacks", entry])
    assert str(caught.value).startswith("callbacks")
    assert message in str(caught.value)
