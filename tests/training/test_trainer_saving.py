"""When a run saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from distmp.checkpoint import store, writer
from distmp.checkpoint.snapshot import HostBuffers
from distmp.training.train import main
from tests.marks import nightly
from tests.torchrun import TINY, corpus


def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[int]:
    """Train 6 steps; return the steps of the checkpoints."""
    monkeypatch.chdir(tmp_path)
    data = f"--data.path={corpus(tmp_path / 'corpus')}"
    fixed = [*TINY, data, "--steps=6", "--run-dir=run", "--checkpoint.keep=99"]
    assert main([*fixed, *arguments]) == 0
    paths = sorted((tmp_path / "run" / "checkpoints").iterdir())
    return [store.StoredCheckpoint(path).numbers["step"] for path in paths]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [6]),
        nightly(["--checkpoint.every=4"], [4, 6]),
        nightly(["--checkpoint.every=3", "--checkpoint.no-asynchronous"], [3, 6]),
    ],
)
def test_steps_between_checkpoints(
    arguments: list[str], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved(tmp_path, monkeypatch, *arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], []),
        nightly(["--checkpoint.every=4"], [1]),
        nightly(["--checkpoint.every=6"], []),
        nightly(["--checkpoint.every=3", "--checkpoint.no-asynchronous"], []),
    ],
)
def test_memory_is_prepared_once_if_saves_follow(
    arguments: list[str], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = []

    def expecting(tensors: dict[str, Tensor], _: HostBuffers) -> None:
        assert any(name.startswith("optimizer/") for name in tensors)
        updates.append(int(tensors["engine/counts"][0]))

    monkeypatch.setattr(writer, "allocate", expecting)
    saved(tmp_path, monkeypatch, *arguments)
    assert updates == expected
