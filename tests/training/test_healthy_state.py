"""A run whose weights become NaN keeps its last healthy state, and continues from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from distmp.checkpoint import manifest
from distmp.export.export import export
from distmp.models.loss import next_token_loss
from distmp.train import main
from distmp.training.callbacks.callback import Callback, StepResult, TrainingLoop
from tests.marks import nightly
from tests.torchrun import TINY, corpus

FIRST_BAD_STEP = 7
ADVICE = "/run/checkpoints/step-000006, from which --resume auto"


def first_parameter(trainer: TrainingLoop) -> torch.Tensor:
    return next(trainer.engine.model.parameters()).detach()


class LeavesNaN(Callback):
    """Writes a NaN into the weights, as a broken optimizer does."""

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        def poison(*_: Any) -> None:
            if trainer.progress.step == FIRST_BAD_STEP - 1:
                first_parameter(trainer)[0, 0] = math.nan

        trainer.engine.optimizer.register_step_post_hook(poison)


class SkipsAll(Callback):
    """Makes every step skip, and leaves the weights finite."""

    def on_step_begin(self, trainer: TrainingLoop, step: int) -> None:
        if step >= FIRST_BAD_STEP:
            self.before = first_parameter(trainer).clone()
            first_parameter(trainer).fill_(math.nan)

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        if result.step >= FIRST_BAD_STEP:
            first_parameter(trainer).copy_(self.before)


@pytest.fixture(autouse=True)
def directory_with_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distmp.config.MAX_CONSECUTIVE_SKIPS", 12)
    corpus(tmp_path / "corpus")


def train(*arguments: str) -> int:
    fixed = [*TINY, "--data.path=corpus", "--steps=20", "--run-dir=run", "--checkpoint.every=2"]
    return main([*fixed, *arguments])


def marks() -> dict[int, str | None]:
    return {
        int(path.name.removeprefix("step-")): manifest.read(path).health.problem
        for path in sorted(Path("run/checkpoints").glob("step-??????"))
    }


@pytest.mark.nightly
def test_nan_weights_resume_from_last_healthy_checkpoint(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    assert train(f"--callbacks={__name__}:LeavesNaN") == 1
    error = capsys.readouterr().err
    assert "max_consecutive_skips = 12: that many steps in a row" in error
    assert ADVICE in error
    found = marks()
    assert list(found) == [4, 6, 19], "the healthy ones stay, and the latest for examination"
    assert (found[4], found[6]) == (None, None)
    assert str(found[19]).startswith("NaN or infinite values in model/")

    caplog.clear()
    assert train("--resume=auto") == 0
    assert f"continuing from {Path.cwd()}/run/checkpoints/step-000006" in capsys.readouterr().out
    warning = caplog.records[0].getMessage()
    assert "step-000019 is marked as unhealthy: NaN or infinite values in model/" in warning
    export("run", "weights")
    assert train("--run-dir=undisturbed") == 0
    export("undisturbed", "expected")
    weights, expected = (load_file(f"{name}/model.safetensors") for name in ("weights", "expected"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.nightly
def test_checkpoint_during_skipped_steps_is_marked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Otherwise a save would hold the weights that the callback changes.
    assert train(f"--callbacks={__name__}:SkipsAll", "--checkpoint.no-asynchronous") == 1
    # Those of steps 8 to 16 have not displaced others. That of step 6 has the same weights.
    assert marks() == {4: None, 6: None, 18: "the last 12 steps were all skipped"}
    assert (
        f"healthy checkpoint is {Path.cwd()}/run/checkpoints/step-000004" in capsys.readouterr().err
    )


def test_checkpoint_in_final_skipped_steps_is_ignored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of step 8, after two skipped steps; no later one is due before the limit."""
    monkeypatch.setattr("distmp.config.MAX_CONSECUTIVE_SKIPS", 3)
    rare = ["--checkpoint.every=4", "--checkpoint.no-asynchronous"]
    assert train(f"--callbacks={__name__}:SkipsAll", *rare) == 1
    assert (
        f"healthy checkpoint is {Path.cwd()}/run/checkpoints/step-000004" in capsys.readouterr().err
    )
    problem = "max_consecutive_skips = 3: that many steps in a row had no finite update"
    assert marks() == {4: None, 9: problem}


def not_a_number(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss, weight = next_token_loss(model, batch)
    return math.nan * loss, weight


@pytest.mark.parametrize("policy", [nightly("bf16"), "fp16"])
@pytest.mark.parametrize("steps", [11, nightly(13)])
def test_run_without_update_fails_and_has_no_healthy_checkpoint(
    policy: str,
    steps: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It ends after step 11, or at the limit of 12 steps."""
    options = [f"--model.loss={__name__}:not_a_number", f"--precision.policy={policy}"]
    assert train(*options, f"--steps={steps}") == 1
    error = capsys.readouterr().err
    assert "; there is no healthy checkpoint in " in error
    assert "so start again without --resume" in error
    if steps == 11:
        assert "all 11 steps were skipped, so the weights after step 11 are the initial" in error
    last = min(steps, 12)
    assert marks() == {last: f"the last {last} steps were all skipped"}
    assert any("step-000010 is marked as unhealthy" in message for message in caplog.messages)
    assert train(*options, "--resume=auto") == 1
    assert "can be used" in capsys.readouterr().err


class EndsEarly(Callback):
    """Ends the run after a step whose checkpoint is saved first."""

    def on_step_end(self, trainer: TrainingLoop, result: StepResult) -> None:
        if result.step == 4:
            trainer.finish_early("a reason")


def test_step_that_was_saved_before_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--model.loss={__name__}:not_a_number", f"--callbacks={__name__}:EndsEarly"]
    assert train(*options) == 1
    assert "; there is no healthy checkpoint in " in capsys.readouterr().err
    assert str(marks()[4]).startswith("all 4 steps were skipped")


@pytest.mark.nightly
@pytest.mark.parametrize("policy", [nightly("fp32"), "bf16"])
def test_damaged_weights_do_not_replace_healthy_checkpoints(
    policy: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("WARNING")
    rates = [f"--precision.policy={policy}", "--checkpoint.every=5"]
    assert train(*rates, "--steps=10") == 0
    ruined = [*rates, "--optim.lr=1e30", "--resume=auto"]
    # It ends as if killed, before a checkpoint is marked.
    assert train(*ruined, "--steps=19") == 0
    assert marks() == {5: None, 10: None, 19: None}
    assert manifest.read(Path("run/checkpoints/step-000019")).health.skipped_in_a_row == 8
    warning = caplog.records[-1].getMessage()
    assert (
        "the last 8 steps were all skipped, so the weights after step 19 are those of step 11"
        in warning
    )
    assert "continue from a checkpoint before step 11 with --resume PATH" in warning

    # The latest one is used while nothing is known about it. A run without an update fails.
    assert train(*ruined, "--steps=20") == 1
    found = capsys.readouterr()
    assert f"continuing from {Path.cwd()}/run/checkpoints/step-000019" in found.out
    assert "the last 9 steps were all skipped" in found.err
    assert ADVICE.replace("000006", "000010") in found.err
    assert list(marks()) == [5, 10, 20]
    assert str(marks()[20]).startswith("the last 9 steps were all skipped, so the weights after")
    monkeypatch.setattr("distmp.config.MAX_CONSECUTIVE_SKIPS", 50)
    assert train(*ruined, "--steps=25") == 1
    assert ADVICE.replace("000006", "000010") in capsys.readouterr().err
    assert list(marks()) == [5, 10, 25]
    assert marks()[25] == "the last 14 steps were all skipped"

    caplog.clear()
    assert train(*rates, "--steps=25", "--resume=auto") == 0
    assert f"continuing from {Path.cwd()}/run/checkpoints/step-000010" in capsys.readouterr().out
    [warning, *_] = [record.getMessage() for record in caplog.records]
    assert "step-000025 is marked as unhealthy: the last 14 steps were all skipped" in warning
    assert marks()[25] is None


def test_export_of_nan_weights_warns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    assert train(f"--callbacks={__name__}:LeavesNaN", "--steps=8") == 0
    marked = Path("run/checkpoints/step-000008")
    caplog.clear()
    export(marked, "marked")
    warnings = [record.getMessage() for record in caplog.records]
    assert "is marked as unhealthy: NaN or infinite values in model/" in warnings[0]
