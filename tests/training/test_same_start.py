"""Runs have the same bits at any number of ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from distmp.telemetry.records import read_records
from distmp.training.callbacks import Callback, TrainingLoop
from tests.elastic import Job, run_jobs
from tests.reference import gathered
from tests.torchrun import TINY, corpus

STEPS = 10
REPRODUCIBLE = ["--strategy=ddp", "--reproducible=True"]
# Number of ranks, and options.
RUNS = [
    (1, ["--strategy=single", "--reproducible=True"]),
    (2, REPRODUCIBLE),
    (4, REPRODUCIBLE),
    (4, ["--strategy=fsdp"]),
]


class InitialWeights(Callback):
    """Writes a digest of the weights before the first step."""

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        state = trainer.engine.state_dict()
        digest = hashlib.sha256()
        for name, value in sorted(gathered(state).items()):
            if name.startswith("model/"):
                digest.update(name.encode() + value.numpy().tobytes())
        Path(f"start-{trainer.world.rank}").write_text(digest.hexdigest())


@pytest.mark.nightly
def test_initial_weights_and_losses_are_the_same_bits(tmp_path: Path) -> None:
    arguments = [
        *TINY,
        f"--data.path={corpus(tmp_path / 'corpus')}",
        "--run-dir=run",
        "--log.every=1",
        "--schedule.warmup-steps=2",
        "--callbacks=tests.training.test_same_start:InitialWeights",
        f"--steps={STEPS}",
    ]
    jobs = [Job([*arguments, *options], ranks=ranks) for ranks, options in RUNS]
    done = run_jobs(jobs, tmp_path)
    assert [job.exit_codes for job in done] == [{}] * len(RUNS), done
    digests, losses = set(), set()
    for number, (ranks, options) in enumerate(RUNS):
        directory = tmp_path / str(number)
        digests |= {(directory / f"start-{rank}").read_text() for rank in range(ranks)}
        records = read_records(directory / "run" / "steps.jsonl")
        assert len(records) == STEPS
        if "--reproducible=True" in options:
            losses.add(tuple(record.loss for record in records))
    assert len(digests) == 1
    assert len(losses) == 1
