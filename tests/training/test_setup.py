"""Models whose constructor cannot be deferred."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest
import torch

from distmp.config import load
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.export.weights import StoredWeights
from distmp.telemetry.records import read_records
from distmp.training.callbacks import Callback, TrainingLoop
from distmp.training.components import build_engine, build_model_and_data
from tests.elastic import Job, run_jobs
from tests.ranks import ranks
from tests.reference import gathered
from tests.torchrun import corpus, tiny
from tests.utils.test_deferred import ReadsMemory

MODEL = f"{ReadsMemory.__module__}:{ReadsMemory.__qualname__}"


def build(directory: Path, *options: str) -> None:
    """Build the model on the first of two ranks."""
    settings = [f"--model.name={MODEL}", f"--data.path={corpus(directory)}", *options]
    build_model_and_data(
        load([*settings, "--data.sequence-length=16"]), World(0, 2, torch.device("cpu"), None)
    )


@pytest.mark.parametrize(
    ("option", "messages"), [("--strategy=auto", 1), ("--strategy=fsdp", 1), ("--strategy=ddp", 0)]
)
def test_undeferrable_model_is_built_whole(
    tmp_path: Path, option: str, messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="distmp"):
        build(tmp_path, option)
    warnings = [
        message for message in caplog.messages if message.endswith("builds the whole model first")
    ]
    assert len(warnings) == messages


# Runs have the same bits at any number of ranks.


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
def test_deferred_and_whole_models_have_equal_bits(tmp_path: Path) -> None:
    arguments = tiny(tmp_path, "--log.every=1", "--schedule.warmup-steps=2", f"--steps={STEPS}")
    arguments.append("--callbacks=tests.training.test_setup:InitialWeights")
    jobs = [Job([*arguments, *options], ranks=ranks) for ranks, options in RUNS]
    done = run_jobs(jobs, tmp_path)
    assert [job.exit_codes for job in done] == [{}] * len(RUNS), done
    digests, losses = set(), set()
    for number, (size, options) in enumerate(RUNS):
        directory = tmp_path / str(number)
        digests |= {(directory / f"start-{rank}").read_text() for rank in range(size)}
        records = read_records(directory / "run" / "steps.jsonl")
        assert len(records) == STEPS
        if "--reproducible=True" in options:
            losses.add(tuple(record.loss for record in records))
    assert len(digests) == 1
    assert len(losses) == 1


@ranks(2)
def test_ranks_that_find_other_weights_are_refused(tmp_path: Path) -> None:
    world = World.current("cpu")
    config = load(tiny(tmp_path / str(world.rank)))
    parts = build_model_and_data(config, world)
    assert parts.weights is None
    if world.rank == 1:  # as if only this machine had the files
        parts = parts._replace(weights=StoredWeights(tmp_path / "weights"))
    found = r"model weights = none on rank 0; .*/weights on rank 1: ranks find different files"
    with pytest.raises(ConfigError, match=found):
        build_engine(config, parts, world, policy="fp32")
