"""Secrets of a configuration or the environment reach their users, and no file of the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from accelerate import PartialState

from distmp.config import load
from distmp.errors import ConfigError
from distmp.telemetry.records import read_records
from distmp.training.run_fingerprint import changes_since
from distmp.training.train import main
from tests.telemetry.test_trackers import Recorder
from tests.torchrun import TINY, corpus

SECRET = "hush-hush"
TRACKER = f"{__name__}:Account"


class Account(Recorder):
    received: ClassVar[list[str]] = []

    def __init__(self, project: str, directory: str, api_key: str, address: str) -> None:
        super().__init__(project, directory)
        self.received += [api_key, address]


@pytest.fixture
def _no_accelerate_state() -> object:
    yield
    PartialState._reset_state()


@pytest.mark.usefixtures("_no_accelerate_state")
def test_no_file_of_a_run_contains_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_HUB_PAT", SECRET)
    monkeypatch.setenv("NCCL_PROXY", f"http://me:{SECRET}@host")
    directory = tmp_path / "run"

    def train(secret: str, *more: str) -> int:
        address = f"https://me:{secret}@host"
        tracker = {"name": TRACKER, "options": {"api_key": secret, "address": address}}
        arguments = [*TINY, f"--data.path={corpus(tmp_path / 'corpus')}", f"--run-dir={directory}"]
        arguments += ["--log.trackers", json.dumps(tracker)]
        arguments += more
        monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "distmp.train", *arguments])
        return main(arguments)

    assert train(SECRET, "--steps=2") == 0
    # The tracker gets the real values, and a run may resume with others.
    assert train("other-secret", "--steps=3", "--resume=auto") == 0
    assert Account.received[::2] == [SECRET, "other-secret"]
    assert [record.step for record in read_records(directory / "steps.jsonl")] == [1, 2, 3]

    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        for secret in (SECRET, "other-secret"):
            assert secret.encode() not in path.read_bytes(), path
    for path in (
        directory / "config.yaml",
        directory / "manifest.json",
        *directory.rglob("state.json"),
    ):
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert SECRET not in "".join(capfd.readouterr())

    with pytest.raises(ConfigError, match="is hidden in files that distmp writes"):
        load(["--config", str(directory / "config.yaml")])


def test_a_checkpoint_from_before_secrets_were_hidden() -> None:
    def numbers(secret: str) -> dict[str, object]:
        tracker = {"name": "wandb", "options": {"api_key": secret}}
        return {"configuration": {"log": {"trackers": [tracker]}}}

    changes = changes_since(numbers(SECRET), numbers("***"))
    assert not changes.harmless
