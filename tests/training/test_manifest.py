from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distmp.distributed.world import World
from distmp.errors import SetupError
from distmp.masking import HIDDEN, masked
from distmp.training import manifest
from distmp.training.manifest import (
    read,
    record,
    revision,
)
from distmp.utils.settings.convert import digest
from tests.ranks import run_ranks


def on_each_rank(path: Path) -> int:
    for steps in (1, 2):
        record(path, World.current("cpu"), {"steps": steps}, first_step=steps - 1)
    return os.getpid()


def test_a_start_of_several_ranks(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    pids = run_ranks(on_each_rank, 2, path)
    first, second = read(path)
    assert (first["configuration"], second["configuration"]) == ({"steps": 1}, {"steps": 2})
    assert (first["first_step"], second["first_step"]) == (0, 1)
    assert first["configuration_hash"] == digest({"steps": 1}) != second["configuration_hash"]
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


def test_revision(tmp_path: Path) -> None:
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


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    record(path, World.current("cpu"), settings)
    assert "hush" not in path.read_text()


@pytest.mark.parametrize("text", ["", "[]", '{"starts": 3}', "{"])
def test_something_else_in_its_place_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(SetupError, match=r"manifest\.json: not a manifest"):
        record(path, World.current("cpu"), {})
    assert path.read_text() == text


def test_a_failure_while_writing_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    manifest.append(path, {"started": "now"})

    def fail(*_: Any, **__: Any) -> str:
        raise RuntimeError

    monkeypatch.setattr(json, "dumps", fail)
    with pytest.raises(RuntimeError):
        manifest.append(path, {"started": "later"})
    assert [start["started"] for start in read(path)] == ["now"]
    assert list(tmp_path.iterdir()) == [path]
