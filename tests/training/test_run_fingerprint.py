from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from distmp.config import RunConfig
from distmp.data.build import Datasets
from distmp.distributed.world import World
from distmp.precision import policy
from distmp.training.run_fingerprint import Changes, changes_since, digest, run_fingerprint, to_json
from distmp.utils.settings import from_mapping

ALONE = World(0, 1, torch.device("cpu"), None)


class Data:
    """Samples with a digest."""

    def __init__(self, size: int = 8, digest: str = "d") -> None:
        self.size, self.found = size, digest

    def __len__(self) -> int:
        return self.size

    def digest(self) -> str:
        return self.found


def numbers(
    values: dict[str, Any] | None = None,
    data: Any = None,
    vocabulary: int | None = 257,
    world: World = ALONE,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Return the numbers of a checkpoint, as they are read from the disk."""
    datasets = Datasets(data or Data(), None, vocabulary, "")
    config = from_mapping(RunConfig, values or {})
    return json.loads(json.dumps(run_fingerprint(config, datasets, world, policy(precision))))


def test_what_a_checkpoint_contains() -> None:
    found = numbers({"seed": 7, "log": {"trackers": ["tensorboard"]}})
    assert found["configuration"]["seed"] == 7
    assert found["configuration"]["log"]["trackers"] == ["tensorboard"]
    assert found["data"] == {"samples": 8, "vocabulary": 257, "digest": "d"}
    assert found["ranks"] == {"number": 1, "device": "cpu", "precision": "fp32"}
    assert found["versions"]["torch"] == torch.__version__
    assert from_mapping(RunConfig, found["configuration"]).seed == 7


def test_the_hash_is_that_of_the_configuration() -> None:
    found = numbers()
    assert found["configuration_hash"] == digest(to_json(RunConfig()))
    backwards = dict(reversed(found["configuration"].items()))
    assert digest(backwards) == found["configuration_hash"]
    assert numbers({"seed": 2})["configuration_hash"] != found["configuration_hash"]
    assert len(found["configuration_hash"]) == 64


def test_equal_runs_have_no_changes() -> None:
    values = {"optim": {"options": {"betas": [0.9, 0.95]}}, "sharding": {"wrap": ["Block"]}}
    assert changes_since(numbers(values), numbers(values)) == Changes()


def test_nested_settings_and_facts_are_compared() -> None:
    before = numbers({"optim": {"lr": 1e-3}, "precision": {"loss_scale": {"init": 4.0}}})
    now = numbers(
        {"optim": {"lr": 3e-4}, "precision": {"loss_scale": {"init": 8.0}}},
        world=World(0, 4, torch.device("cpu"), None),
        precision="bf16",
    )
    found = changes_since(before, now)
    assert found.harmless == {"number of ranks": "number of ranks: 1 -> 4"}
    assert [line.split(" (")[0] for line in found.consequential.values()] == [
        "precision.loss_scale.init: 4.0 -> 8.0",
        "optim.lr: 0.001 -> 0.0003",
        "resolved precision: fp32 -> bf16",
    ]
    assert found.dangerous == {}


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (numbers(data=Data(size=9)), "samples in the data: 8 -> 9"),
        (numbers(data=Data(digest="e")), "digest of the data: d -> e"),
        (numbers(vocabulary=300), "vocabulary of the data: 257 -> 300"),
        (numbers({"model": {"options": {"layers": 9}}}), 'model.options: {} -> {"layers": 9}'),
        (numbers({"data": {"sequence_length": 8}}), "data.sequence_length: 256 -> 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_model_or_other_data_is_dangerous(now: dict[str, Any], line: str) -> None:
    found = changes_since(numbers(), now)
    assert [dangerous.split(" (")[0] for dangerous in found.dangerous.values()] == [line]


def test_the_warmup_is_compared_as_a_number_of_updates() -> None:
    def share(steps: int) -> dict[str, Any]:
        return numbers({"steps": steps, "schedule": {"warmup_steps": None}})

    explicit = numbers({"steps": 200, "schedule": {"warmup_steps": 10}})
    assert changes_since(explicit, share(200)) == Changes()
    assert changes_since(share(200), explicit) == Changes()
    found = changes_since(share(200), share(400))
    assert [line.split(" (")[0] for line in found.consequential.values()] == [
        "steps: 200 -> 400",
        "schedule.warmup_steps: 10 -> 20",
    ]


def test_the_same_data_in_another_directory_is_harmless() -> None:
    found = changes_since(numbers({"data": {"path": "/a"}}), numbers({"data": {"path": "/b"}}))
    assert found == Changes(harmless={"data.path": "data.path: /a -> /b"})


def test_facts_that_one_side_lacks_are_not_compared() -> None:
    before = numbers()
    del before["data"]["digest"], before["versions"]
    assert changes_since(before, numbers(data=[1, 2, 3, 4, 5, 6, 7, 8])) == Changes()
