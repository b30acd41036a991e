"""Ranks of the trainer that may not allocate as much memory as the whole model takes in FP32."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest

from distmp.commands import export
from distmp.export.weights import load_model
from distmp.process import end_process
from distmp.telemetry.records import read_records
from distmp.train import main
from distmp.training.callbacks import Callback, TrainingLoop
from tests.elastic import Job, run_jobs
from tests.memory_limit import limit_memory, reset_peak, status
from tests.torchrun import corpus

transformers = pytest.importorskip("transformers")
LlamaForCausalLM = transformers.LlamaForCausalLM  # imported now: ranks fork from this

LAYERS, DIMENSION, HIDDEN, HEADS, VOCABULARY = 28, 384, 1152, 4, 300
# Bytes of the model in FP32, in the transformer of distmp and in Llama.
WHOLE = 4 * LAYERS * (4 * DIMENSION**2 + 3 * DIMENSION * HIDDEN)
VOCABULARY_OF_BYTES = 256
LIMIT = int(0.92 * WHOLE)
# What a rank holds at start-up, relative to what it holds while it trains.
START = 1.1

COMMON = [
    "--strategy=fsdp",
    # Without optimizer state: shards of weights and gradients are less than half of the model.
    "--optim.name=sgd",
    "--optim.options={momentum: 0.0}",
    "--schedule.name=constant",
    "--schedule.warmup-steps=0",
    "--sharding.accumulate=sharded",
    "--precision.policy=fp32",
    "--batch.global-batch-size=20",
    # Activations are small.
    "--data.sequence-length=2",
    "--validation.final-samples=5",
    # A copy of the state that is written while training continues would be one more shard.
    "--checkpoint.asynchronous=False",
    "--callbacks=tests.training.test_memory_limited:Peaks",
]
SIZES = {"layers": LAYERS, "dimension": DIMENSION, "hidden": HIDDEN, "heads": HEADS}
TRANSFORMER = [f"--model.options={json.dumps(SIZES)}"]


def _job(*arguments: str, ranks: int, data: Path, **variables: str) -> Job:
    options = [*COMMON, f"--batch.microbatch-size={20 // ranks}", f"--data.path={data}"]
    return Job(
        [*options, *arguments],
        entry="tests.training.test_memory_limited:train_within_limit",
        ranks=ranks,
        variables=variables,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of transformers with random weights in many files."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIMENSION,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="20MB")
    assert len([*path.glob("*.safetensors")]) > 5
    return path


@pytest.mark.nightly
def test_random_weights_train_and_export_in_limited_memory(tmp_path: Path) -> None:
    """A run starts, is killed, continues on another number of ranks, and is exported."""
    data = corpus(tmp_path / "corpus")
    arguments = [*TRANSFORMER, f"--run-dir={tmp_path / 'run'}", "--steps=3"]
    jobs = [
        _job(*arguments, "--checkpoint.every=2", ranks=4, data=data, KILL_AFTER_SAVE="2"),
        _job(*arguments, "--resume=auto", ranks=5, data=data),
        Job(
            [str(tmp_path / "run"), f"--to={tmp_path / 'weights'}"],
            entry="tests.training.test_memory_limited:export_within_limit",
            ranks=1,
        ),
    ]
    killed, resumed, exported = run_jobs(jobs, tmp_path)
    assert set(killed.exit_codes.values()) == {-signal.SIGKILL}, killed
    assert resumed.exit_codes == {}, resumed
    assert "continuing from" in resumed.stdout
    assert exported.exit_codes == {}, exported
    records = read_records(tmp_path / "run" / "steps.jsonl")
    assert [record.step for record in records] == [1, 2, 3]
    assert records[0].loss == pytest.approx(math.log(VOCABULARY_OF_BYTES), rel=0.1)
    assert_little_is_held_at_start(tmp_path / "0", ranks=4)
    assert_little_is_held_at_start(tmp_path / "1", ranks=5)
    model = load_model(tmp_path / "weights")
    assert 4 * sum(parameter.numel() for parameter in model.parameters()) >= WHOLE


@pytest.mark.nightly
def test_model_files_train_and_export_in_limited_memory(tmp_path: Path, directory: Path) -> None:
    arguments = [f"--model.name=hf:{directory}", "--run-dir=run", "--steps=2"]
    (done,) = run_jobs([_job(*arguments, ranks=4, data=corpus(tmp_path / "corpus"))], tmp_path)
    assert done.exit_codes == {}, done
    assert_little_is_held_at_start(tmp_path / "0", ranks=4)
    start = LlamaForCausalLM.from_pretrained(directory).state_dict()
    assert export.main([str(tmp_path / "0" / "run"), f"--to={tmp_path / 'weights'}"]) == 0
    model = LlamaForCausalLM.from_pretrained(tmp_path / "weights")
    assert 4 * sum(parameter.numel() for parameter in model.parameters()) >= WHOLE
    for name, value in model.state_dict().items():
        assert 0 < (value - start[name]).abs().max() < 1e-2, name


def assert_little_is_held_at_start(directory: Path, ranks: int) -> None:
    for rank in range(ranks):
        peaks = json.loads((directory / f"peaks-{rank}.json").read_text())
        assert peaks["start"] <= START * peaks["steps"], peaks


# In the processes of ranks


def train_within_limit(arguments: list[str]) -> None:
    """Run a rank of the trainer that may allocate `LIMIT` bytes."""
    limit_memory(LIMIT)
    Peaks.before = status("VmRSS")
    reset_peak()
    end_process(main(arguments))


def export_within_limit(arguments: list[str]) -> None:
    """Run `distmp export` in a process that may allocate `LIMIT` bytes."""
    limit_memory(LIMIT)
    sys.exit(export.main(arguments))


class Peaks(Callback):
    """Writes the peak of resident memory at start-up and of the steps."""

    before = 0

    def on_train_begin(self, trainer: TrainingLoop) -> None:
        self.start = status("VmHWM") - self.before
        reset_peak()

    def on_step_end(self, trainer: TrainingLoop, result: object) -> None:
        peaks = {"start": self.start, "steps": status("VmHWM") - self.before}
        Path(f"peaks-{trainer.world.rank}.json").write_text(json.dumps(peaks))

    def on_save(self, trainer: TrainingLoop, step: int, seconds: float) -> None:
        if step == int(os.environ.get("KILL_AFTER_SAVE", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
