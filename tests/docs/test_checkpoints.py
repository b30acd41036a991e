"""The pages on checkpoints and weights agree with the code; tests/checkpoint has the rest."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from benchmarks.figures import ROOT
from distmp.checkpoint import recovery, saving
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import RunConfig, load
from distmp.export.files import MAX_SHARD_SIZE
from distmp.train import main
from distmp.training.run_fingerprint import all_rules, compare
from distmp.utils.settings import from_mapping
from tests.checkpoint import listing
from tests.settings import leaf_names
from tests.torchrun import tiny

PAGE = (ROOT / "docs" / "checkpoints.md").read_text()
WEIGHTS = (ROOT / "docs" / "weights.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def first_column(table: str) -> list[str]:
    """Return what stands in backticks in the first column of the tables of a section."""
    return [
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]


def test_checkpoint_contents_agree_with_page(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(tiny(tmp_path, f"--run-dir={run}", "--steps=1", "--precision.policy=fp16")) == 0
    path = listing.latest(run / "checkpoints")
    assert path is not None
    described = first_column(section("Contents"))
    files = {file.name for file in path.iterdir()}
    assert files == {name for name in described if not name.endswith("...")} - {"__1_0.distcp"}
    tensors = {f"{name.partition('/')[0]}/..." for name in StoredCheckpoint(path).tensors}
    assert tensors == {name for name in described if name.endswith("...")}
    assert {"step", "samples"} <= StoredCheckpoint(path).state.numbers.keys()


def test_retention_example_agrees_with_page() -> None:
    described = first_column(section("Retention"))
    values = dict(setting.removeprefix("checkpoint.").split(": ") for setting in described)
    config = from_mapping(
        RunConfig,
        {"checkpoint": {"every": 100} | {k: yaml.safe_load(v) for k, v in values.items()}},
    )
    assert (config.checkpoint.keep, config.checkpoint.keep_every) == (2, 1000)


def test_damage_message_agrees_with_page(tmp_path: Path) -> None:
    shown = section("Damage").split("```text\n")[1].split(" cannot be used: ")[1]
    assert "has 81920 bytes, not the 94208 that were written" in shown
    path = saving.save(tmp_path, 1, {}, {}, keep=1)
    (path / "__0_0.distcp").write_bytes(b"12")
    [found] = recovery.usable(tmp_path).damaged
    assert found.endswith("/step-000001/__0_0.distcp has 2 bytes, not the 0 that were written")


def flat(config: RunConfig) -> dict[str, object]:
    found = {}
    for name in leaf_names(RunConfig):
        value: object = config
        for part in name.split("."):
            value = getattr(value, part)
        found[name] = value
    return found


def test_reported_changes_agree_with_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = re.findall(r"^distmp train (--run-dir runs/pages .*)$", PAGE, re.MULTILINE)
    first, second = (flat(load(shlex.split(line))) for line in lines)
    shown = re.findall(r"^    (changed: .*)$", PAGE, re.MULTILINE)
    assert len(shown) == 2
    found = compare(first, second)
    assert [f"changed: {line}" for line in found.consequential.values()] == shown
    assert found.harmless == found.dangerous == {}


def test_examples_of_changes_have_the_right_kind() -> None:
    rows = re.findall(r"^\| (?:rounding|training|the run).*\| .* \| (.*) \|$", PAGE, re.MULTILINE)
    kinds = ("harmless", "consequential", "dangerous")
    assert len(rows) == len(kinds)
    for row, kind in zip(rows, kinds, strict=True):
        examples = re.findall(r"`([\w.]+)`", row)
        assert examples
        for example in examples:
            of_it = [name for name in leaf_names(RunConfig) if f"{name}.".startswith(f"{example}.")]
            assert of_it
            assert {all_rules()[name].kind for name in of_it} == {kind}, example


def test_file_size_on_page_agrees_with_code() -> None:
    assert f"several files of up to {MAX_SHARD_SIZE // 10**9} GB" in WEIGHTS
