"""Real steps of one and two ranks, recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distmp.distributed.progress import current_phase
from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.telemetry.measurements import StepTimer
from distmp.telemetry.profiler import measured
from distmp.telemetry.settings import ProfileConfig
from distmp.training.callbacks.profiling import Profiling
from tests import reference
from tests.ranks import run_ranks
from tests.reference import TWO_RANKS, fused_adamw, make_model, microbatches

STEPS = 4
ANYTHING: Any = None
WINDOW = "2:3"
SLEEP_SECONDS = 0.3
CPU = World(0, 1, torch.device("cpu"), None)


class StepProfiler:
    """Calls the hooks of `Profiling` as the trainer does."""

    def __init__(
        self, config: ProfileConfig, directory: Path, world: World, log: Callable[[str], object]
    ) -> None:
        run: Any = SimpleNamespace(
            config=SimpleNamespace(profile=config),
            directory=SimpleNamespace(profile=directory),
            world=world,
            console=SimpleNamespace(message=log),
        )
        self._callback = Profiling(run)

    def before(self, step: int) -> None:
        trainer: Any = SimpleNamespace(timer=StepTimer())
        self._callback.on_step_begin(trainer, step)

    def finish(self) -> None:
        result: Any = SimpleNamespace(rolls_back=True)
        self._callback.on_step_end(ANYTHING, result)

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None:
            self._callback.on_train_end(ANYTHING, finished=True)
        self._callback.on_exit(ANYTHING, error)


class Slow:
    """Makes rank 1 sleep at one place in every recorded step."""

    def __init__(self, place: str) -> None:
        self._place = place

    def at(self, place: str) -> None:
        recorded = current_phase.now.step in ProfileConfig(WINDOW).window
        if recorded and place == self._place and World.current("cpu").rank == 1:
            time.sleep(SLEEP_SECONDS)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, float]:
        self.at("forward")
        return reference.loss(model, batch)


def train(
    directory: Path, strategy: str, place: str, steps: str | None
) -> tuple[list[float], list[str]]:
    """Train with one slow rank; return losses and norms, and the logged lines."""
    lines: list[str] = []
    slow = Slow(place)
    engine = reference.make_engine(loss=slow.loss, strategy=strategy)
    outcomes = []
    with StepProfiler(ProfileConfig(steps), directory, engine.world, lines.append) as profiler:
        for step in range(1, STEPS + 1):
            profiler.before(step)
            current_phase.begin_step(step, first=step == 1)
            slow.at("data")
            batches = microbatches(step, TWO_RANKS[0], engine.world.rank)
            outcomes.append(engine.step(batches).numbers)
    assert current_phase.observer is None
    return [number for one in outcomes for number in (one.loss, one.grad_norm)], lines


def profiled(directory: Path) -> dict[str, Any]:
    plain, _ = train(directory / "none", "ddp", "", None)
    found: dict[str, Any] = {"plain": plain}
    for strategy, place in (("ddp", "data"), ("ddp", "forward"), ("fsdp", "forward")):
        name = f"{strategy} {place}"
        found[name] = train(directory / name, strategy, place, WINDOW)
    found["fsdp"] = train(directory / "none", "fsdp", "", None)[0]
    return found


def times(trace: Path) -> tuple[float, float]:
    """Return the time of a step, and its exposed communication."""
    found = measured(json.loads(trace.read_text())["traceEvents"], on_cuda=False)
    assert found is not None
    return found


@pytest.mark.nightly
def test_profile_locates_slow_rank_and_waiting_rank(tmp_path: Path) -> None:
    first, second = run_ranks(profiled, 2, tmp_path, timeout=100)
    # Recording changes no number.
    assert first["ddp data"][0] == first["ddp forward"][0] == first["plain"]
    assert first["fsdp forward"][0] == first["fsdp"]
    assert not (tmp_path / "none").exists()
    for name in ("ddp data", "ddp forward", "fsdp forward"):
        fast, slow = (times(tmp_path / name / f"trace-rank{rank}.json") for rank in range(2))
        # Forward sleeps in every microbatch; data are loaded once per step.
        slept = SLEEP_SECONDS * (2 if "forward" in name else 1)
        assert slow[0] - slow[1] >= slept
        assert fast[1] > slept / 2
        assert fast[1] > 2 * slow[1]
        (line,) = first[name][1]
        assert line.startswith("profile of steps 2 to 3 on 2 ranks, ")
        assert "rank 1 on " in line
        assert line.endswith("ms a step longer")
        assert second[name][1] == []
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [
            *("operators-rank0.txt", "operators-rank1.txt"),
            *("trace-rank0.json", "trace-rank1.json"),
        ]
    # The trace contains the phases of a step in order, inside of the step.
    events = json.loads((tmp_path / "ddp data" / "trace-rank1.json").read_text())["traceEvents"]
    ranges = {e["name"]: e for e in events if e.get("cat") == "user_annotation"}
    outer = ranges["step 3"]
    end = outer["ts"]
    for phase in (
        *("loading data", "beginning of the step", "forward of microbatch 1"),
        *("backward of microbatch 1", "forward of microbatch 2", "backward of microbatch 2"),
        *("reduction of the gradients", "decision", "update"),
    ):
        assert ranges[phase]["ts"] >= end
        end = ranges[phase]["ts"] + ranges[phase]["dur"]
    assert end <= outer["ts"] + outer["dur"]
    assert "step 1" not in ranges
    assert "step 4" not in ranges


def recorded(directory: Path, steps: str, first: int, last: int, fails_in: int = 0) -> list[str]:
    """Run steps that allocate; return the logged lines."""
    lines: list[str] = []
    with StepProfiler(ProfileConfig(steps), directory, CPU, lines.append) as profiler:
        for step in range(first, last + 1):
            profiler.before(step)
            current_phase.begin_step(step, first=step == first)
            torch.zeros(1 << 20, dtype=torch.uint8)
            current_phase.enter("update")
            kept = [torch.zeros(2 << 20, dtype=torch.uint8) for _ in range(3)]
            if step == fails_in:
                raise ValueError("a fault")
            del kept
    return lines


def test_operator_table_has_shapes_and_memory(tmp_path: Path) -> None:
    recorded(tmp_path, "2:3", 1, 4)
    table = (tmp_path / "operators-rank0.txt").read_text()
    assert "Input Shapes" in table
    (row,) = (line for line in table.splitlines() if "aten::zeros " in line)
    assert " MB " in row


@pytest.mark.parametrize(
    ("steps", "first", "last", "expected"),
    [
        ("2:3", 1, 2, ["profile of steps 2 to 2 on 1 rank"]),  # the run ends
        ("2", 1, 2, ["profile of steps 2 to 2 on 1 rank"]),
        ("2:4", 3, 5, ["profile of steps 3 to 4"]),
        ("2:3", 4, 5, ["nothing was recorded, step 2 did not run"]),
        ("4:5", 1, 3, ["nothing was recorded, step 4 did not run"]),
        ("4:5", 6, 5, ["nothing was recorded, step 4 did not run"]),
    ],
)
def test_partially_run_profile_window_is_reported(
    tmp_path: Path, steps: str, first: int, last: int, expected: list[str]
) -> None:
    lines = recorded(tmp_path, steps, first, last)
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert part in line


def test_rolled_back_steps_are_profiled_once(tmp_path: Path) -> None:
    lines: list[str] = []
    with StepProfiler(ProfileConfig("2:3"), tmp_path, CPU, lines.append) as profiler:
        for steps in ((1, 2), (1, 2, 3)):
            for step in steps:
                profiler.before(step)
                current_phase.begin_step(step, first=False)
            profiler.finish()
    (line,) = lines
    assert line.startswith("profile of steps 2 to 2 on 1 rank")


def test_failed_run_writes_its_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="a fault"):
        recorded(tmp_path, "2:4", 1, 4, fails_in=3)
    assert current_phase.observer is None
    events = json.loads((tmp_path / "trace-rank0.json").read_text())["traceEvents"]
    assert {"step 2", "step 3"} <= {event["name"] for event in events}
    assert (tmp_path / "operators-rank0.txt").exists()
    assert f"the recording up to the error is in {tmp_path}" in caplog.text


def test_disk_error_does_not_end_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "file"
    directory.write_text("in the way")
    assert recorded(directory, "2", 1, 3) == []
    assert "cannot write the profile: " in caplog.text
    assert caplog.text.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_profile_contains_cuda_steps(tmp_path: Path) -> None:
    lines: list[str] = []
    engine = Engine(make_model(), reference.loss, fused_adamw, policy="fp32", device="cuda")
    with StepProfiler(ProfileConfig("3:4"), tmp_path, engine.world, lines.append) as profiler:
        for step in range(1, 6):
            profiler.before(step)
            current_phase.begin_step(step, first=step == 1)
            if step > 2:
                time.sleep(SLEEP_SECONDS)
            kept = torch.zeros(1 << 26, dtype=torch.uint8, device="cuda")
            engine.step(microbatches(step, [(4,)]))
            del kept
    trace = json.loads((tmp_path / "trace-rank0.json").read_text())
    found = measured(trace["traceEvents"], on_cuda=True)
    assert found is not None
    assert found[0] >= 0.9 * SLEEP_SECONDS
    assert found[1] == 0
    assert "aten::mm" in (tmp_path / "operators-rank0.txt").read_text()
    assert (tmp_path / "memory-rank0.pickle").stat().st_size > 0
    assert "ms a step" in lines[0]
