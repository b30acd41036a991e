from __future__ import annotations

import pytest

from distmp.config import RunConfig
from distmp.errors import ConfigError
from distmp.training import resume_compat as changes
from distmp.training import run_fingerprint as origin
from distmp.training.resume_compat import CONSEQUENTIAL, DANGEROUS, HARMLESS, NOT_COMPARED, compare
from distmp.utils.settings import leaf_names

TABLES = (NOT_COMPARED, HARMLESS, tuple(CONSEQUENTIAL), tuple(DANGEROUS))


def test_every_setting_stands_in_exactly_one_table() -> None:
    classified = [name for table in TABLES for name in table]
    compared = [*leaf_names(RunConfig), *origin.FACTS.values()]
    assert sorted(set(compared) - set(classified)) == [], "decide what a change of these means"
    assert sorted(set(classified) - set(compared)) == [], "there are no such settings"
    assert sorted(name for name in classified if classified.count(name) > 1) == []


def test_each_difference_is_told_as_its_table_says() -> None:
    before = {"optim.lr": 0.001, "log.every": 10, "seed": 1, "resume": None, "steps": 5}
    now = {"optim.lr": 0.0003, "log.every": 1, "seed": 2, "resume": "auto", "steps": 5}
    found = compare(before, now, {})
    assert list(found.harmless.values()) == ["log.every: 10 -> 1"]
    assert list(found.consequential.values()) == [
        "optim.lr: 0.001 -> 0.0003 (other learning rates from here on)"
    ]
    assert list(found.dangerous.values()) == [f"seed: 1 -> 2 ({DANGEROUS['seed']})"]


def test_values_are_shown_as_they_are_written() -> None:
    before = {"strategy": "ddp", "compile": "none", "data.path": None, "optim.options": {"a": [1]}}
    now = {"strategy": "fsdp", "compile": "none", "data.path": "/x", "optim.options": {"a": [2]}}
    found = compare(before, now, {})
    assert list(found.harmless.values()) == ["strategy: ddp -> fsdp", "data.path: null -> /x"]
    assert found.consequential["optim.options"].startswith(
        'optim.options: {"a": [1]} -> {"a": [2]} ('
    )


def test_settings_of_other_versions() -> None:
    found = compare({"gone": 3, "old": 1}, {"old": 1, "new": 2, "newer": 3}, {"new": 2, "newer": 1})
    assert found == changes.Changes(
        harmless={"newer": "newer: 1 -> 3", "gone": "gone: 3 -> (unknown)"}
    )


def test_dangerous_changes_are_refused_in_one_message() -> None:
    before = {"model.layers": 2, "seed": 1, "log.every": 1}
    found = compare(before, {"model.layers": 3, "seed": 2, "log.every": 2}, {})
    with pytest.raises(ConfigError) as caught:
        found.refuse("runs/x/checkpoints/step-000008")
    message = str(caught.value)
    for part in (
        "runs/x/checkpoints/step-000008",
        "model.layers: 2 -> 3 (weights of another model)",
        "seed: 1 -> 2",
        "resume_force",
        "distmp export",
    ):
        assert part in message
    assert "log.every" not in message
    compare(before, before | {"log.every": 7}, {}).refuse("x")


def test_harmless_ones_are_said_and_the_others_are_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said: list[str] = []
    before = {"optim.lr": 1, "log.every": 10, "seed": 1}
    compare(before, {"optim.lr": 2, "log.every": 1, "seed": 2}, {}).tell(said.append)
    assert said == ["changed: log.every: 10 -> 1"]
    assert [(r.levelname, r.getMessage().split(" (")[0]) for r in caplog.records] == [
        ("WARNING", "changed: optim.lr: 1 -> 2"),
        ("WARNING", "changed: seed: 1 -> 2"),
    ]
