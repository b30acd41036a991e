from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from distmp.config import RunConfig
from distmp.data.datasets import Datasets
from distmp.data.token_metadata import TokenMetadata
from distmp.distributed.stopping import StopSignals
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.precision import policy
from distmp.telemetry.console import Console
from distmp.training.run_fingerprint import (
    RUN_PROPERTIES,
    Changes,
    all_rules,
    changes_since,
    compare,
    describe_model,
    run_fingerprint,
    tokenizer_directory,
)
from distmp.training.trainer import Trainer
from distmp.utils.annotations import HARMLESS, consequential, resume_rules
from distmp.utils.settings import from_mapping
from tests.settings import leaf_names
from tests.training.test_resume import configuration, train

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


def test_checkpoint_contains_configuration_data_and_versions() -> None:
    found = numbers({"seed": 7, "log": {"trackers": ["tensorboard"]}})
    assert found["configuration"]["seed"] == 7
    assert found["configuration"]["log"]["trackers"] == ["tensorboard"]
    assert found["data"] == {
        "samples": 8,
        "vocabulary": 257,
        "digest": "d",
        "held_out": None,
        "held_out_digest": None,
    }
    assert found["ranks"] == {"number": 1, "device": "cpu", "precision": "fp32"}
    assert found["versions"]["torch"] == torch.__version__
    assert from_mapping(RunConfig, found["configuration"]).seed == 7


def test_equal_runs_have_no_changes() -> None:
    values = {"optim": {"options": {"betas": [0.9, 0.95]}}, "sharding": {"wrap": ["Block"]}}
    assert changes_since(numbers(values), numbers(values)) == Changes()


def test_nested_settings_and_environment_are_compared() -> None:
    before = numbers({"optim": {"lr": 1e-3}, "precision": {"loss_scale": {"init": 4.0}}})
    now = numbers(
        {
            "optim": {"lr": 3e-4},
            "precision": {"loss_scale": {"init": 8.0}},
            "batch": {"microbatch_size": 8},
        },
        world=World(0, 4, torch.device("cpu"), None),
        precision="bf16",
    )
    found = changes_since(before, now)
    assert found.harmless == {"number of ranks": "number of ranks: 1 -> 4"}
    line = found.consequential.pop("batch.microbatch_size")
    assert line.endswith(": 16 -> 8 (masks of dropout and batch statistics change)")
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
def test_other_model_or_data_is_dangerous(now: dict[str, Any], line: str) -> None:
    found = changes_since(numbers(), now)
    assert [dangerous.split(" (")[0] for dangerous in found.dangerous.values()] == [line]


def test_hidden_values_are_not_compared_silently() -> None:
    def of(secret: str) -> dict[str, Any]:
        options = {"api_key": secret}
        return numbers({"data": {"source": f"{__name__}:Data", "options": options}})

    found = changes_since(of("question"), of("answer"))
    assert found.consequential == {
        "data.options": 'data.options: {"api_key": "***"} (may be other values, because those of '
        "secrets are not compared)"
    }


def test_options_of_imported_model_are_not_described() -> None:
    """The description is exported with the weights."""
    values = {"model": {"name": "json:loads", "options": {"s": "{}", "api_key": "hush"}}}
    found = describe_model(torch.nn.Linear(1, 1), from_mapping(RunConfig, values))
    assert "hush" not in json.dumps(found)


def test_tokenizer_of_model_is_not_that_of_bytes(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    found = []
    for source, tokenizer in (("text", ""), ("tokens", "bytes"), ("tokens", "unknown")):
        TokenMetadata("uint16", 257, {}, tokenizer=tokenizer).write(tmp_path)
        data = {"source": source, "path": str(tmp_path)}
        values = {"model": {"name": f"hf:{tmp_path}"}, "data": data}
        found.append(tokenizer_directory(from_mapping(RunConfig, values)))
    assert found == [None, None, tmp_path]


def test_warmup_is_compared_in_updates() -> None:
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


def test_moved_data_is_harmless() -> None:
    found = changes_since(numbers({"data": {"path": "/a"}}), numbers({"data": {"path": "/b"}}))
    assert found == Changes(harmless={"data.path": "data.path: /a -> /b"})


def test_values_missing_on_one_side_are_not_compared() -> None:
    before = numbers()
    del before["data"]["digest"], before["versions"]
    assert changes_since(before, numbers(data=[1, 2, 3, 4, 5, 6, 7, 8])) == Changes()


def test_rules_cover_exactly_the_settings() -> None:
    compared = [*leaf_names(RunConfig), *RUN_PROPERTIES]
    assert sorted(set(compared) - set(all_rules())) == [], "declare what a change of these means"
    assert sorted(set(all_rules()) - set(compared)) == [], "there are no such settings"


def test_consequential_rules_name_their_effect() -> None:
    for name, rule in all_rules().items():
        assert bool(rule.effect) == (rule.kind in ("consequential", "dangerous")), name


def test_section_rule_applies_to_settings_without_own() -> None:
    @dataclass(frozen=True)
    class Section:
        inherits: int = 1
        own: int = field(default=1, metadata=consequential("own"))

    config = dataclasses.make_dataclass(
        "Config",
        [
            ("ruled", Section, field(default_factory=Section, metadata=HARMLESS)),
            ("unruled", Section, field(default_factory=Section)),
            ("missing", int, field(default=1)),
        ],
    )
    assert {name: (rule.kind, rule.effect) for name, rule in resume_rules(config).items()} == {
        "ruled.inherits": ("harmless", ""),
        "ruled.own": ("consequential", "own"),
        "unruled.own": ("consequential", "own"),
    }


def test_each_change_is_reported_by_its_rule() -> None:
    before = {"optim.lr": 0.001, "log.every": 10, "seed": 1, "resume": None, "steps": 5}
    now = {"optim.lr": 0.0003, "log.every": 1, "seed": 2, "resume": "auto", "steps": 5}
    changes = compare(before, now)
    assert list(changes.harmless.values()) == ["log.every: 10 -> 1"]
    assert list(changes.consequential.values()) == [
        "optim.lr: 0.001 -> 0.0003 (learning rates change from here on)"
    ]
    assert list(changes.dangerous.values()) == [
        "seed: 1 -> 2 (the order of the data changes: samples are repeated or never used)"
    ]


def test_values_are_shown_as_configured() -> None:
    before = {"strategy": "ddp", "compile": "none", "data.path": None, "optim.options": {"a": [1]}}
    now = {"strategy": "fsdp", "compile": "none", "data.path": "/x", "optim.options": {"a": [2]}}
    changes = compare(before, now)
    assert list(changes.harmless.values()) == ["strategy: ddp -> fsdp", "data.path: null -> /x"]
    assert changes.consequential["optim.options"].startswith(
        'optim.options: {"a": [1]} -> {"a": [2]} ('
    )


def test_settings_of_other_versions_are_harmless() -> None:
    changes = compare({"gone": 3, "old": 1}, {"old": 1, "new": 2})
    assert changes == Changes(
        harmless={"new": "new: (unknown) -> 2", "gone": "gone: 3 -> (unknown)"}
    )


def test_dangerous_changes_are_one_message() -> None:
    before = {"model.size": "1m", "seed": 1, "log.every": 1}
    changes = compare(before, {"model.size": "22m", "seed": 2, "log.every": 2})
    with pytest.raises(ConfigError) as caught:
        changes.refuse("runs/x/checkpoints/step-000008")
    message = str(caught.value)
    for part in (
        "runs/x/checkpoints/step-000008",
        "model.size: 1m -> 22m (the weights belong to another model)",
        "seed: 1 -> 2",
        "resume_force",
        "distmp export",
    ):
        assert part in message
    assert "log.every" not in message
    compare(before, before | {"log.every": 7}).refuse("x")


def test_harmless_changes_are_logged_others_warn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logged: list[str] = []
    before = {"optim.lr": 1, "log.every": 10, "seed": 1}
    compare(before, {"optim.lr": 2, "log.every": 1, "seed": 2}).report(logged.append)
    assert logged == ["changed: log.every: 10 -> 1"]
    assert [(r.levelname, r.getMessage().split(" (")[0]) for r in caplog.records] == [
        ("WARNING", "changed: optim.lr: 1 -> 2"),
        ("WARNING", "changed: seed: 1 -> 2"),
    ]


def test_fewer_steps_than_checkpoint_and_constant_schedule_keep_learning_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    train(configuration(tmp_path, steps=4, schedule={"name": "cosine"}))
    changed = ["changed: steps: 4 -> 5"]
    cases = ((4, "cosine", []), (3, "cosine", []), (5, "cosine", changed), (6, "constant", []))
    for steps, schedule, expected in cases:
        caplog.clear()
        config = configuration(tmp_path, steps=steps, schedule={"name": schedule}, resume="auto")
        run = Trainer(config, World.current("cpu"), Console(config.log))
        assert run.run(StopSignals())
        warnings = [record.getMessage().split(" (")[0] for record in caplog.records]
        assert [line for line in warnings if line.startswith("changed: steps")] == expected
        left = "nothing is left to train: the checkpoint is of step 4"
        assert (left in capsys.readouterr().out) == (steps <= 4)
