"""A run that stops and resumes, with the real trainer: its samples and its results."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset

from distmp.config import RunConfig
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.errors import ConfigError, SetupError
from distmp.precision import Resolution
from distmp.telemetry.console import Console
from distmp.telemetry.records import StepRecord, read_records
from distmp.telemetry.settings import LogConfig
from distmp.training import components
from distmp.training.trainer import Trainer
from distmp.utils.settings import from_mapping
from tests.marks import nightly
from tests.ranks import in_turn, ranks, run_ranks
from tests.reference import CLASSES, INPUTS, Classifier, assert_same_bits, snapshot

HERE = "tests.training.test_resume"
SIZE, GLOBAL_BATCH, MICROBATCH = 40, 8, 2

# The indices of each microbatch that this process has trained on.
consumed: list[list[int]] = []


class Samples:
    """Sample i contains its index; with `augmented`, its inputs are drawn at random each time."""

    def __init__(self, augmented: bool, poison: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SIZE, INPUTS, generator=generator)
        self.labels = torch.randint(CLASSES, (SIZE,), generator=generator)
        self.inputs[7] *= poison
        self.augmented = augmented

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.randn(INPUTS) if self.augmented else 0.0
        return {
            "index": torch.tensor(index),
            "inputs": self.inputs[index] + noise,
            "targets": self.labels[index],
        }


def samples(
    split: str, sequence_length: int, augmented: bool = False, poison: float = 1.0
) -> Samples | None:
    return Samples(augmented, poison)


class WithDropout(Classifier):
    """A classifier with dropout, and a buffer that forward writes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.register_buffer("average", torch.zeros(INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(x.detach().float().mean(0), 0.1)
        return super().forward(F.dropout(x, self.dropout, self.training))


def model(dropout: float = 0.0) -> nn.Module:
    return WithDropout(dropout)


def loss(module: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if module.training and torch.is_grad_enabled():  # not what the first step tries out
        consumed.append(batch["index"].tolist())
    logits = module(batch["inputs"]).float()
    kept = batch["targets"] >= 0
    return F.cross_entropy(logits, batch["targets"], reduction="sum", ignore_index=-100), kept.sum()


def configuration(run_dir: Path, **values: Any) -> RunConfig:
    """Return the settings of a tiny run, with sections and settings replaced."""
    sections: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model": {"name": f"{HERE}:model", "loss": f"{HERE}:loss"},
        "data": {"source": f"{HERE}:samples"},
        "batch": {"global_batch_size": GLOBAL_BATCH, "microbatch_size": MICROBATCH},
        "precision": {"policy": "fp32"},
        "optim": {"lr": 0.01},
        "schedule": {"name": "constant", "warmup_steps": 2},
        "validation": {"final_samples": 4},
    }
    for name, value in values.items():
        both = isinstance(value, dict) and name in sections
        sections[name] = sections[name] | value if both else value
    return from_mapping(RunConfig, sections)


def train(config: RunConfig) -> Trainer:
    """Train on the ranks of this process group, or alone."""
    trainer = Trainer(config, World.current("cpu"), Console(config.log, quiet=True))
    assert trainer.run(StopSignals())
    return trainer


@ranks(2)
def test_policy_that_one_rank_does_not_support_is_refused_by_all(tmp_path: Path) -> None:
    def refused(policy: object, device: torch.device) -> Resolution:
        raise ConfigError("precision.policy", policy, "needs a newer GPU")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(components, "resolve", refused)
        with pytest.raises(SetupError, match="needs a newer GPU"):
            train(configuration(tmp_path))


# At the same number of ranks: the same bits.


AUGMENTED = {"data": {"options": {"augmented": True}}}
STRADDLED = {"name": "cosine", "warmup_steps": 6}
CASES: dict[str, dict[str, Any]] = {
    "ddp, dropout, a schedule, validation in between": {
        "model": {"options": {"dropout": 0.3}},
        "schedule": STRADDLED,
        "validation": {"every": 3},
    },
    "fp16, the loss scale grows and backs off": {
        "precision": {"policy": "fp16", "loss_scale": {"init": 2.0**14, "growth_interval": 1}},
        "model": {"options": {"dropout": 0.3}},
        "schedule": STRADDLED,
    },
    "fsdp, bf16": {
        "strategy": "fsdp",
        "precision": {"policy": "bf16"},
        "model": {"options": {"dropout": 0.3}},
    },
    "ddp with a sharded optimizer, bf16": {
        "shard_optimizer": True,
        "precision": {"policy": "bf16"},
        "schedule": STRADDLED,
    },
    "reproducible, fp16-autocast, a sharded optimizer": {
        "shard_optimizer": True,
        "reproducible": True,
        "precision": {"policy": "fp16-autocast"},
        "model": {"options": {"dropout": 0.3}},
    },
    "microbatches left out": {
        "precision": {"policy": "fp16", "on_nonfinite": "drop_microbatch"},
        "data": {"options": {"poison": float("nan")}},
    },
    "samples with random numbers": AUGMENTED,
}


def same(record: StepRecord) -> dict[str, Any]:
    """Return the fields that do not depend on the speed of a step; as text, for NaN equals NaN."""
    timed = ("weight_per_second", "step_seconds", "memory_bytes")
    return {name: repr(value) for name, value in vars(record).items() if name not in timed}


@ranks(2, timeout=150)
def check_resuming(tmp_path: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        values = CASES[name]
        _check_that_it_happened(name, interrupted(tmp_path / str(number), values, values))


def interrupted(
    directory: Path, values: dict[str, Any], values_resumed: dict[str, Any]
) -> list[StepRecord]:
    """Compare a run with one that was killed in its last step; return the records of both."""
    first, second = directory / "whole", directory / "resumed"
    common = {"steps": 10, "checkpoint": {"every": 5, "keep": 3}}
    whole = train(configuration(first, **common, **values))
    _barrier()
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.copytree(first, second)
        shutil.rmtree(second / "checkpoints" / "step-000010")
    _barrier()
    resumed = train(configuration(second, resume="auto", **common, **values_resumed))
    _barrier()  # rank 0 adds the last validation to its record
    assert_same_bits(snapshot(resumed.engine), snapshot(whole.engine))
    records = [read_records(path / "steps.jsonl") for path in (first, second)]
    assert [same(r) for r in records[1]] == [same(r) for r in records[0]]
    return records[0]


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _check_that_it_happened(name: str, records: list[StepRecord]) -> None:
    """Check that what names a case happened, before and after the checkpoint."""
    if "loss scale" in name:
        scales = [record.loss_scale for record in records]
        assert max(scales) > scales[0]
        assert any(r.skipped for r in records[:5]) or any(r.skipped for r in records[5:])
    if "left out" in name:
        assert any(r.dropped for r in records[:5])
        assert any(r.dropped for r in records[5:])
    if "validation" in name:
        assert [r.step for r in records if r.validation_loss is not None] == [3, 6, 9, 10]


@pytest.mark.parametrize("names", [[*CASES][1::2], nightly([*CASES][::2])], ids=["some", "others"])
def test_resumed_bits_agree_with_uninterrupted_run(names: list[str], tmp_path: Path) -> None:
    check_resuming(tmp_path, names)


def test_data_workers_change_no_bit(tmp_path: Path) -> None:
    workers = {"data": {"options": {"augmented": True}, "workers": 1}}
    interrupted(tmp_path, AUGMENTED, workers)


def outside_of_the_state_dict() -> dict[str, Tensor]:
    size = 70_000  # the trainer builds smaller ones at once
    keep, rates = torch.ones(size, dtype=torch.bool), torch.full((size,), 0.5)
    return {"keep": keep, "positions": torch.arange(size), "rates": rates}


class Masked(Classifier):
    def __init__(self) -> None:
        super().__init__()
        for name, value in outside_of_the_state_dict().items():
            self.register_buffer(name, value, persistent=False)


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_buffers_outside_of_the_state_dict_have_their_values(strategy: str, tmp_path: Path) -> None:
    values: dict[str, Any] = {"model": {"name": f"{HERE}:Masked"}, "strategy": strategy}
    run, weights = tmp_path / strategy, tmp_path / f"{strategy}-weights"
    first = train(configuration(run, steps=3, **values))
    first.engine.export(weights)
    resumed = train(configuration(run, steps=6, resume="auto", **values))
    values["model"]["weights"] = str(weights)
    started = train(configuration(tmp_path / f"{strategy}-started", steps=3, **values))
    for trainer in (first, resumed, started):
        assert_same_bits(dict(trainer.engine.model.named_buffers()), outside_of_the_state_dict())


# With a changed configuration.


def resume(directory: Path, **values: Any) -> Trainer:
    """Train three steps with the default configuration, then up to the sixth with other values."""
    if not (directory / "run").exists():
        train(configuration(directory / "run", steps=3))
    return train(configuration(directory / "run", **{"steps": 6, "resume": "auto", **values}))


def _files(run: Path) -> dict[Path, bytes]:
    """Return the files of a run, without the lease that each job takes."""
    files = (path for path in run.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if not path.name.startswith("lease-")}


def test_checkpoint_of_other_run_is_refused_unchanged(tmp_path: Path) -> None:
    resume(tmp_path)
    before = _files(tmp_path / "run")
    with pytest.raises(SetupError) as caught:
        resume(tmp_path, seed=2, data={"options": {"poison": 2.0}}, optim={"name": "sgd"}, steps=9)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "step-000006" in message
    lines = [line.strip().split(" (")[0] for line in message.splitlines() if line.startswith("  ")]
    assert lines == [
        "seed: 1 -> 2",
        'data.options: {} -> {"poison": 2.0}',
        "optim.name: adamw -> sgd",
    ]
    assert _files(tmp_path / "run") == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_forced_resume_accepts_other_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = resume(tmp_path, seed=2, optim={"name": "sgd"}, resume_force=True)
    assert "changed: seed: 1 -> 2" in caplog.text
    assert "changed: optim.name: adamw -> sgd" in caplog.text
    assert [r.step for r in read_records(tmp_path / "run" / "steps.jsonl")] == list(range(1, 7))
    state = trainer.engine.state_dict()
    assert int(state["engine/counts"][0]) == 6
    assert not [name for name in state if "exp_avg" in name]


def test_allowed_changes_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    train(configuration(tmp_path / "run", steps=3, schedule={"name": "cosine"}))
    capsys.readouterr()
    config = configuration(
        tmp_path / "run",
        steps=6,
        schedule={"name": "cosine"},
        resume="auto",
        optim={"lr": 0.02},
        log={"console": "off", "every": 3},
        precision={"policy": "fp16", "loss_scale": {"growth_interval": 100}},
    )
    Trainer(config, World.current("cpu"), Console(LogConfig()))
    logged = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed: ")]
    assert logged == [
        "changed: precision.policy: fp32 -> fp16",
        "changed: log.every: 10 -> 3",
        "changed: log.console: plain -> off",
    ]
    warned = [r.getMessage().split(" (")[0] for r in caplog.records if r.name == "distmp"]
    assert warned == [
        "changed: steps: 3 -> 6",
        "changed: precision.loss_scale.growth_interval: 2000 -> 100",
        "changed: optim.lr: 0.01 -> 0.02",
        "changed: resolved precision: fp32 -> fp16",
    ]


held_out = {"size": 6}


def growing(split: str, sequence_length: int) -> Subset[dict[str, Tensor]]:
    size = SIZE if split == "train" else held_out["size"]
    return Subset(Samples(False, 1.0), range(size))


def test_held_out_data_that_grew_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"source": f"{HERE}:growing"}
    train(configuration(tmp_path / "run", data=data, steps=3))
    monkeypatch.setitem(held_out, "size", 9)
    train(configuration(tmp_path / "run", data=data, steps=4, resume="auto"))
    assert "held-out samples: 6 -> 9" in caplog.text


def shuffled(split: str, sequence_length: int) -> Subset[dict[str, Tensor]]:
    indices = np.random.permutation(SIZE).tolist()
    random.shuffle(indices)
    return Subset(Samples(False, 1.0), indices)


def test_resumed_run_has_the_samples_of_a_shuffle_that_has_no_seed(tmp_path: Path) -> None:
    consumed.clear()
    source = {"source": f"{HERE}:shuffled"}
    train(configuration(tmp_path / "run", data=source, steps=3))
    train(configuration(tmp_path / "run", data=source, steps=5, resume="auto"))
    assert sorted(i for each in consumed for i in each) == list(range(SIZE))


def test_checkpoint_of_a_custom_loop_with_another_optimizer_is_refused(tmp_path: Path) -> None:
    engine = train(configuration(tmp_path / "run", steps=3)).engine
    saved = engine.save(tmp_path / "own", {"samples": 24})
    sgd = configuration(tmp_path / "sgd", resume=str(saved), optim={"name": "sgd"})
    with pytest.raises(ConfigError, match=r"state of the optimizer AdamW, .*model\.weights"):
        train(sgd)


# At other numbers of ranks and with other strategies: the same samples in the same order.


class Leg(NamedTuple):
    """A part of a run: on how many ranks, and how."""

    ranks: int
    plain: dict[str, Any]
    reproducible: dict[str, Any]


STEPS = 5
LEGS = (
    Leg(1, {"strategy": "single"}, {"strategy": "single"}),
    Leg(2, {"strategy": "ddp"}, {"strategy": "ddp"}),
    Leg(4, {"strategy": "fsdp"}, {"strategy": "ddp", "shard_optimizer": True}),
    Leg(2, {"strategy": "ddp", "shard_optimizer": True}, {"strategy": "ddp"}),
)


class Travelled(NamedTuple):
    consumed: list[list[int]]
    weights: dict[str, Tensor]


def travel(
    directory: Path, plain: dict[str, Any], reproducible: dict[str, Any], steps: int
) -> dict[str, Travelled]:
    """Train two runs up to a step, from where they stand."""
    found = {}
    for name, values in (
        ("plain", plain),
        # Dropout draws by microbatch there, so that it is the same wherever that is computed.
        ("reproducible", {**reproducible, "model": {"options": {"dropout": 0.3}}}),
    ):
        consumed.clear()
        config = configuration(
            directory / name,
            steps=steps,
            resume="auto",
            reproducible=name == "reproducible",
            **values,
        )
        weights = snapshot(train(config).engine)
        found[name] = Travelled(list(consumed), weights)
    return found


def global_batches(leg: list[Travelled]) -> list[list[int]]:
    """Put together what the ranks have seen, a list for each step."""
    each = GLOBAL_BATCH // MICROBATCH // len(leg)
    return [
        [
            index
            for rank in leg
            for microbatch in rank.consumed[step * each : (step + 1) * each]
            for index in microbatch
        ]
        for step in range(len(leg[0].consumed) // each)
    ]


@pytest.mark.nightly
def test_world_size_and_strategy_changes_keep_bits(tmp_path: Path) -> None:
    alone = {"strategy": "single"}
    total = STEPS * len(LEGS)
    (reference,) = run_ranks(travel, 1, tmp_path / "stayed", alone, alone, total)
    journey = [
        run_ranks(travel, leg.ranks, tmp_path / "moved", leg.plain, leg.reproducible, steps)
        for leg, steps in zip(LEGS, range(STEPS, total + 1, STEPS), strict=True)
    ]
    for name in ("plain", "reproducible"):
        stayed = global_batches([reference[name]])
        moved = [batch for leg in journey for batch in global_batches([rank[name] for rank in leg])]
        assert len(stayed) == total
        assert moved == stayed
        # Not by our own order alone: an epoch has every sample once.
        flat = [index for batch in moved for index in batch]
        for start in range(0, len(flat) - SIZE + 1, SIZE):
            assert sorted(flat[start : start + SIZE]) == list(range(SIZE))
        # Two epochs have different orders.
        assert flat[:SIZE] != flat[SIZE : 2 * SIZE]
    losses = [
        [r.loss for r in read_records(tmp_path / run / "plain" / "steps.jsonl")]
        for run in ("stayed", "moved")
    ]
    assert len(losses[0]) == total
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)
    assert_same_bits(journey[-1][1]["reproducible"].weights, reference["reproducible"].weights)
