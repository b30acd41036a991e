"""The trainer on iterable datasets: the same run at any number of ranks, and after a resume."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from distmp.distributed.world import World
from distmp.errors import ConfigError, SetupError
from distmp.telemetry.records import read_records
from distmp.training.components import build_model_and_data
from distmp.training.trainer import Trainer
from tests.ranks import from_all_ranks, ranks
from tests.reference import assert_same_bits, snapshot
from tests.training.test_resume import SIZE, Samples, configuration, consumed, train

HERE = "tests.training.test_streams"


class Stream(IterableDataset[Any]):
    """The samples of `Samples` in another order in each epoch, with noise in each sample."""

    def __init__(self, size: int) -> None:
        self.samples = Samples(augmented=True, poison=1.0)
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(self.size).tolist():
            yield self.samples[index]


class HeldOut(Stream):
    def __iter__(self) -> Iterator[Any]:
        self.samples.augmented = False
        yield from (self.samples[index] for index in range(self.size))


class OfNode(Stream):
    _distributed = "an object of Hugging Face"


class Sized(Stream):
    def __len__(self) -> int:
        return self.size


def streams(split: str, sequence_length: int, kind: str = "stream") -> Any:
    if split == "validation":
        return HeldOut(5)  # three microbatches, which 2 ranks cannot divide
    return {
        "stream": Stream(SIZE),
        "of node": OfNode(SIZE),
        "iterator": iter(Stream(SIZE)),
        "short": Sized(7),
    }[kind]


def unvalidated(split: str, sequence_length: int) -> Any:
    return Stream(SIZE) if split == "train" else None


def settings(directory: Path, **values: Any) -> Any:
    data = {"source": f"{HERE}:streams", **values.pop("data", {})}
    values = {
        "steps": 8,
        "checkpoint": {"every": 3, "keep": 3},
        "validation": {"final_samples": 9},
        **values,
    }
    return configuration(directory, **values, data=data)


def trained_samples() -> list[int]:
    """Return the samples of all ranks, in the order of the steps of each rank."""
    own = [index for microbatch in consumed for index in microbatch]
    consumed.clear()
    if not dist.is_initialized():
        return own
    gathered = from_all_ranks(own)
    share = len(own) // 8
    return [i for step in range(8) for part in gathered for i in part[step * share :][:share]]


def validation_loss(trainer: Trainer, directory: Path) -> float:
    loss = read_records(directory / "steps.jsonl")[-1].validation_loss
    assert loss is not None
    return loss


@ranks(2, timeout=150)
def check_ranks(directory: Path, expected: list[int]) -> None:
    two = train(settings(directory / "two"))
    assert trained_samples() == expected
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(directory / "two", directory / "resumed")
        for step in (6, 8):
            shutil.rmtree(directory / "resumed" / "checkpoints" / f"step-{step:06d}")
    dist.barrier()
    resumed = train(settings(directory / "resumed", resume="auto"))
    assert_same_bits(snapshot(resumed.engine), snapshot(two.engine))
    consumed.clear()


def test_stream_samples_are_independent_of_ranks_and_resume(tmp_path: Path) -> None:
    consumed.clear()  # other tests in this process have trained too
    one = train(settings(tmp_path / "one"))
    samples = trained_samples()
    assert len(samples) == 64
    assert sorted(samples[:SIZE]) == list(range(SIZE))  # each once in an epoch
    assert samples[:SIZE] != list(range(SIZE))
    check_ranks(tmp_path, samples)
    # Continued on one rank by a run that two ranks began; 5 samples are held out, each used once.
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step-000008")
    train(settings(tmp_path / "two", resume="auto"))
    assert [i for microbatch in consumed for i in microbatch] == samples[48:]
    consumed.clear()
    loss = validation_loss(one, tmp_path / "one")
    assert validation_loss(one, tmp_path / "resumed") == pytest.approx(loss, rel=1e-5)


def test_a_stream_shorter_than_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="more than the 7 samples of the training data"):
        train(settings(tmp_path, data={"options": {"kind": "short"}}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"workers": 2}, r"data\.workers = 2: each worker would read the whole stream"),
        ({"options": {"kind": "of node"}}, "it returned a OfNode, which is divided over the ranks"),
        ({"options": {"kind": "iterator"}}, "generator, which can be read only once"),
        ({"options": {"kind": "short"}}, "batch.global_batch_size = 8: is more than the 7 samples"),
    ],
)
def test_unsuitable_data_is_refused_where_it_is_built(
    tmp_path: Path, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model_and_data(settings(tmp_path, data=data), World(0, 1, torch.device("cpu"), None))


def test_validation_needs_a_split(tmp_path: Path) -> None:
    config = settings(tmp_path, data={"source": f"{HERE}:unvalidated"}, validation={"every": 4})
    with pytest.raises(
        ConfigError, match=r"validation.every = 4: .* None .*; set it to 0, or hold"
    ):
        build_model_and_data(config, World(0, 1, torch.device("cpu"), None))
