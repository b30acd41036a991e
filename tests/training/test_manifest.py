"""What a run records about its starts; secrets reach their users, and no file of the run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate import PartialState

from distmp.config import load
from distmp.distributed.world import World
from distmp.errors import ConfigError, SetupError
from distmp.masking import HIDDEN, masked
from distmp.telemetry.records import read_records
from distmp.train import main
from distmp.training.run_directory import append_start, read_starts, record_start, revision
from distmp.training.run_fingerprint import changes_since
from tests.ranks import run_ranks
from tests.telemetry.test_trackers import Recorder
from tests.torchrun import tiny


def on_each_rank(path: Path) -> int:
    for steps in (1, 2):
        record_start(path, World.current("cpu"), {"steps": steps}, first_step=steps - 1)
    return os.getpid()


def test_manifest_describes_start_of_several_ranks(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    pids = run_ranks(on_each_rank, 2, path)
    first, second = read_starts(path)
    assert (first["configuration"], second["configuration"]) == ({"steps": 1}, {"steps": 2})
    assert (first["first_step"], second["first_step"]) == (0, 1)
    host = socket.gethostname()
    assert first["ranks"] == [{"host": host, "pid": pid, "device": "cpu"} for pid in pids]
    assert first["versions"].keys() == {"python", "distmp", "torch", "nccl", "accelerate"}
    assert first["environment"]["WORLD_SIZE"] == "2"
    assert first["started"] <= second["started"]
    assert first["started"].endswith("+00:00")


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=directory, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_manifest_names_git_revision(tmp_path: Path) -> None:
    assert revision(tmp_path) is None
    git(tmp_path, "init")
    assert revision(tmp_path) is None  # no commit yet
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert revision(tmp_path) == {"commit": commit, "dirty": False}
    # What a run writes makes its code no other.
    (tmp_path / "records").write_text("")
    assert revision(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "train.py").write_text("2")
    assert revision(tmp_path) == {"commit": commit, "dirty": True}


def test_revision_is_none_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert revision(Path.cwd()) is None


def test_secrets_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "data": {"token_dtype": "uint16", "options": {"password": "hush", "key": 7}},
        "log": {"trackers": [{"name": "x", "options": {"api_key": "hush", "mode": "online"}}]},
    }
    assert masked(settings) == {
        "data": {"token_dtype": "uint16", "options": {"password": HIDDEN, "key": 7}},
        "log": {"trackers": [{"name": "x", "options": {"api_key": HIDDEN, "mode": "online"}}]},
    }
    words = [
        "--data.token-dtype=uint16",
        "--log.trackers={name: x, options: {api_key: hush}}",
        "a:b",
    ]
    assert masked(words) == [
        "--data.token-dtype=uint16",
        f"--log.trackers={{name: x, options: {{api_key: {HIDDEN}}}}}",
        "a:b",
    ]
    monkeypatch.setattr(sys, "orig_argv", ["python", *words, '{"wandb": {"token" : "hush"}}'])
    for name in ("HF_TOKEN", "WANDB_API_KEY", "TORCH_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("HOME_SWEET_HOME", "hush")  # not on the list of what matters
    path = tmp_path / "manifest.json"
    record_start(path, World.current("cpu"), settings)
    assert "hush" not in path.read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"starts": 3}', "{"])
def test_other_file_in_place_of_manifest_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(SetupError, match=r"manifest\.json: not a manifest"):
        record_start(path, World.current("cpu"), {})
    assert path.read_text() == text


def test_failed_write_keeps_previous_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    append_start(path, {"started": "now"})

    def fail(*_: Any, **__: Any) -> str:
        raise RuntimeError

    monkeypatch.setattr(json, "dumps", fail)
    with pytest.raises(RuntimeError):
        append_start(path, {"started": "later"})
    assert [start["started"] for start in read_starts(path)] == ["now"]
    assert list(tmp_path.iterdir()) == [path]


# Secrets

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
def test_run_files_contain_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_HUB_PAT", SECRET)
    monkeypatch.setenv("NCCL_PROXY", f"http://me:{SECRET}@host")
    directory = tmp_path / "run"

    def train(secret: str, *more: str) -> int:
        address = f"https://me:{secret}@host"
        tracker = {"name": TRACKER, "options": {"api_key": secret, "address": address}}
        arguments = tiny(tmp_path, f"--run-dir={directory}")
        arguments += ["--log.trackers", json.dumps(tracker), *more]
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


def test_masked_secrets_do_not_count_as_changes() -> None:
    def numbers(secret: str) -> dict[str, object]:
        tracker = {"name": "wandb", "options": {"api_key": secret}}
        return {"configuration": {"log": {"trackers": [tracker]}}}

    changes = changes_since(numbers(SECRET), numbers("***"))
    assert not changes.harmless
