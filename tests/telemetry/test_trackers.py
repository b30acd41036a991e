from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState
from accelerate.tracking import GeneralTracker

from distmp.errors import ConfigError
from distmp.telemetry import trackers
from distmp.telemetry.records import read_records
from distmp.telemetry.settings import LogConfig
from tests.elastic import Job, run_jobs
from tests.telemetry.samples import record
from tests.torchrun import tiny

HERE = "tests.telemetry.test_trackers"


class Recorder(GeneralTracker):
    """Writes its calls to a file."""

    name = "recorder"
    requires_logging_directory = True

    def __init__(self, project: str, directory: str, fails_at: int = 0) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.directory = Path(directory)
        self.write("project", project)
        self.write("rank", os.environ.get("RANK"))

    @property
    def tracker(self) -> Path:
        return self.directory

    def write(self, *call: Any) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "calls").open("a") as file:
            file.write(json.dumps(call) + "\n")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.write("configuration", values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if step == self.fails_at:
            raise OSError("the network is gone")
        self.write(step, values)

    def finish(self) -> None:
        self.write("finished")


class Broken(Recorder):
    def start(self) -> None:
        raise RuntimeError("no account")


NAME = f"{HERE}:Recorder"


def calls(directory: Path) -> list[Any]:
    return [json.loads(line) for line in (directory / NAME / "calls").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    yield
    PartialState._reset_state()


def start(names: list[str], directory: Path, warnings: list[str], **options: Any) -> Any:
    return trackers.start(
        {name: {"project": "test", **options.get(name, {})} for name in names},
        directory=directory,
        hyperparameters={"steps": 3, "optim": {"lr": 0.1, "options": {"betas": [0.9, 0.95]}}},
        after_step=0,
        warn=warnings.append,
    )


def test_tracker_gets_scalars_and_flat_configuration(tmp_path: Path) -> None:
    warnings: list[str] = []
    loggers = start([NAME], tmp_path, warnings)
    loggers.write(record(step=1, skipped=True, overflow={"decision": "x"}))
    weight = {"saturated": 0.0, "underflowed": 0.25, "largest": 8.0, "most_saturated": None}
    more = {"validation_metrics": {"accuracy": 0.75}, "low_precision_operands": {"weight": weight}}
    loggers.write(record(step=2, validation_loss=1.5, unit="sample", **more))
    loggers.close()
    project, _, configuration, first, second, finished = calls(tmp_path)
    assert project == ["project", "test"]
    assert configuration[1] == {"steps": 3, "optim.lr": 0.1, "optim.options.betas": "[0.9, 0.95]"}
    assert first[0] == 1
    assert first[1]["skipped"] == 1
    assert first[1]["loss"] == 2.3456
    assert {"step", "overflow", "validation_loss"}.isdisjoint(first[1])
    assert (second[0], second[1]["validation_loss"]) == (2, 1.5)
    assert second[1]["validation_accuracy"] == 0.75
    assert second[1]["low_precision_operands/weight/underflowed"] == 0.25
    assert {"validation_metrics", "low_precision_operands"}.isdisjoint(second[1])
    assert first[1]["tokens_per_second"] == second[1]["samples_per_second"] == 12345.0
    assert "samples_per_second" not in first[1]
    assert finished == ["finished"]
    assert warnings == []


def test_failing_tracker_is_removed(tmp_path: Path) -> None:
    warnings: list[str] = []
    loggers = start([NAME], tmp_path, warnings, **{NAME: {"fails_at": 2}})
    for step in (1, 2, 3):
        loggers.write(record(step=step))
    loggers.close()
    assert [line[0] for line in calls(tmp_path)] == ["project", "rank", "configuration", 1]
    (warning,) = warnings
    assert "the network is gone" in warning
    assert "continues without it" in warning


def test_tracker_start_failure_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no account; fix or remove it"):
        start([f"{HERE}:Broken"], tmp_path, [])
    with pytest.raises(ConfigError, match="unexpected keyword"):
        start([NAME], tmp_path, [], **{NAME: {"colour": 1}})


def test_unknown_trackers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    for changes, setting, message in (
        ({"trackers": ("tensorbord",)}, "log.trackers", "did you mean 'tensorboard'"),
        ({"trackers": ("wandb",)}, "log.trackers", "run pip install 'wandb'"),
        ({"trackers": ("tensorboard",)}, "log.trackers", "distmp.trackers"),
        ({"trackers": (f"{HERE}:calls",)}, "log.trackers", "subclass of accelerate's"),
        ({"trackers": ("nowhere:Tracker",)}, "log.trackers", "no module"),
        ({"trackers": ({"name": NAME, "options": {"fails_at": 2}}, NAME)}, "log.trackers", "once"),
        ({"trackers": ({"name": NAME, "options": 3},)}, "log.trackers[0].options", "section"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            LogConfig(**changes)  # type: ignore[arg-type]
        assert caught.value.setting == setting


@pytest.mark.nightly
def test_only_first_rank_logs_to_trackers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    arguments = tiny(tmp_path, "--steps=2", "--log.trackers", "tensorboard", NAME)
    (done,) = run_jobs([Job(arguments)], tmp_path)
    assert done.exit_codes == {}, done
    directory = tmp_path / "0" / "run"
    written = calls(directory)
    assert [line[0] for line in written] == [
        "project",
        "rank",
        "configuration",
        1,
        2,
        2,
        "finished",
    ]
    assert written[1] == ["rank", "0"]
    assert written[2][1]["model.options.layers"] == 2
    records = read_records(directory / "steps.jsonl")
    (events,) = (directory / "tensorboard" / "distmp").glob("events.*")
    board = accumulator.EventAccumulator(str(events))
    board.Reload()
    losses = [(event.step, event.value) for event in board.Scalars("loss")]
    assert losses == [(r.step, pytest.approx(r.loss, rel=1e-6)) for r in records]
    assert {"learning_rate", "grad_norm", "validation_loss"} <= set(board.Tags()["scalars"])
