"""The example of an image classifier, as a user runs it: two ranks, a resume, an export."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distmp import cli
from distmp.telemetry.records import read_records
from examples.image_classifier import classifier, digits, two_best
from tests.elastic import Job, run_jobs

EXAMPLE = Path(__file__).parents[2] / "examples" / "image_classifier.yaml"
# Fewer and cleaner samples, so that it learns in seconds.
EASIER = [
    "--data.options={samples: 1024, noise: 0.1}",
    "--batch.microbatch-size=16",
    "--validation.every=25",
    "--early-stopping.patience=1",
    "--precision.policy=fp32",
]


@pytest.mark.nightly
def test_classifier_learns_resumes_and_exports_best_average(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = [f"--config={EXAMPLE}", f"--run-dir={run}", *EASIER]
    begun, resumed = run_jobs(
        [Job([*arguments, "--steps=40"]), Job([*arguments, "--resume=auto"])], tmp_path
    )
    assert (begun.exit_codes, resumed.exit_codes) == ({}, {}), resumed.stderr
    assert resumed.stdout.count("finished after step ") == 1
    assert "(early_stopping.patience)" in resumed.stdout
    records = read_records(run / "steps.jsonl")
    assert [record.step for record in records] == [*range(1, len(records) + 1)]
    validated = {r.step: r.validation_metrics or {} for r in records if r.validation_metrics}
    assert [*validated] == [25, 40, *range(50, len(records) + 1, 25)]
    ended = validated[len(records)]
    assert ended["accuracy"] > 0.8
    assert ended["accuracy"] <= ended["two_best"]
    assert f"ema_accuracy {ended['ema_accuracy']:.4f}" in resumed.stdout
    # The best average, evaluated by plain torch.
    best = max(step for step in validated if step < len(records))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step-{best:06}",
        f"step-{len(records):06}",
    ]
    weights, kept = tmp_path / "weights", run / "checkpoints" / f"step-{best:06}"
    assert cli.main(["export", str(kept), "--to", str(weights), "--ema"]) == 0
    assert capsys.readouterr().err == ""
    model = classifier()
    model.load_state_dict(load_file(weights / "model.safetensors"))
    data = digits("validation", 0, samples=1024, noise=0.1)
    batch = torch.utils.data.default_collate([data[index] for index in range(len(data))])
    with torch.no_grad():
        logits = model(batch["inputs"])
    right = float((logits.argmax(-1) == batch["targets"]).float().mean())
    assert math.isclose(right, validated[best]["ema_accuracy"], abs_tol=1e-9)
    count, weight = two_best(logits, batch)
    assert float(count) / weight == pytest.approx(validated[best]["ema_two_best"])


def test_random_crops_apply_only_in_training() -> None:
    train, validation = digits("train", 0, samples=16), digits("validation", 0, samples=128)
    torch.manual_seed(0)
    crops = [train[3]["inputs"] for _ in range(20)]
    assert any(not torch.equal(crops[0], crop) for crop in crops)
    assert torch.equal(validation[3]["inputs"], validation[3]["inputs"])
    assert crops[0].shape == (1, 12, 12)
