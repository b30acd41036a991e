from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from distmp.checkpoint import manifest, saving
from distmp.checkpoint.manifest import STATE_FILE
from distmp.checkpoint.settings import Retention
from distmp.checkpoint.storage import INDEX_FILE, is_checkpoint, prepare, publish
from tests.checkpoint import listing

REMOVE_TREE = shutil.rmtree


def write(directory: Path, step: int, content: str = "") -> Path:
    """Write a checkpoint as `saving.save` does, with `content` in place of tensors."""
    writing = prepare(directory, step)
    (writing / STATE_FILE).write_bytes(manifest.encode(step, {"content": content}, {}))
    (writing / INDEX_FILE).touch()
    (writing / "data").touch()
    return writing


def save(directory: Path, step: int, keep: int = 2, content: str = "") -> None:
    publish(write(directory, step, content))
    saving.tidy(directory, step, Retention(keep))


def content_of(path: Path) -> Any:
    return manifest.read(path).numbers["content"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_latest_is_none_without_checkpoints(tmp_path: Path) -> None:
    assert listing.latest(tmp_path / "missing") is None
    assert listing.latest(tmp_path) is None


def test_latest_compares_step_numbers(tmp_path: Path) -> None:
    save(tmp_path, 999_999)
    save(tmp_path, 1_000_000)
    assert listing.latest(tmp_path) == tmp_path / "step-1000000"


def test_keep(tmp_path: Path) -> None:
    for step in range(10, 60, 10):
        save(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-000030", "step-000040", "step-000050"]


def test_unfinished_and_unrelated_directories_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, 1)
    write(tmp_path, 2)
    save(tmp_path / "elsewhere", 3)
    for name in ("step-000004.removing", "step-000005.abandoned", "step-6", "step-000007x"):
        shutil.copytree(tmp_path / "step-000001", tmp_path / name)
    (tmp_path / "step-000008").mkdir()
    assert listing.latest(tmp_path) == tmp_path / "step-000001"


def test_leftovers_of_crash_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "step-000003.removing").mkdir()
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-000002"]


def test_leftovers_in_use_do_not_stop_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(path: Path) -> None:
        raise OSError(16, "Device or resource busy", str(path))

    (tmp_path / "step-000001.removing").mkdir()
    monkeypatch.setattr(shutil, "rmtree", busy)
    save(tmp_path, 2)
    assert listing.latest(tmp_path) == tmp_path / "step-000002"


def test_discard_removes_unfinished_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step-000001.writing").mkdir()
    saving.discard(tmp_path, 1)
    assert names(tmp_path) == ["step-000001", "step-000002.writing"]
    saving.discard(tmp_path, 2)
    assert names(tmp_path) == ["step-000001"]
    saving.discard(tmp_path / "missing", 2)
    assert caplog.records == []


def test_save_replaces_checkpoint_of_same_step(tmp_path: Path) -> None:
    save(tmp_path, 1, content="old")
    save(tmp_path, 1, content="new")
    assert names(tmp_path) == ["step-000001"]
    assert content_of(tmp_path / "step-000001") == "new"


@pytest.mark.parametrize("continued_from", [math.inf, 1])
def test_replaced_checkpoint_counts_while_its_replacement_is_missing(
    tmp_path: Path, continued_from: float
) -> None:
    save(tmp_path, 1)
    replaced = (tmp_path / "step-000001").rename(tmp_path / "step-000001.replaced")
    for step in (2, 3):
        assert replaced.exists()
        publish(write(tmp_path, step))
        saving.tidy(tmp_path, step, Retention(2, continued_from=continued_from))
    assert names(tmp_path) == ["step-000002", "step-000003"]


def test_checkpoint_with_unreadable_state_neither_counts_nor_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-000002" / STATE_FILE).write_text("damaged")
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]
    save(tmp_path, 4)
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000004"]


def test_later_steps_are_set_aside(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    save(tmp_path, 15, keep=3)
    assert listing.latest(tmp_path) == tmp_path / "step-000015"
    aside = ["step-000020.abandoned", "step-000030.abandoned"]
    assert names(tmp_path) == ["step-000010", "step-000015", *aside]
    assert is_checkpoint(tmp_path / "step-000030.abandoned")


def test_replaced_checkpoint_of_continued_run_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20):
        save(tmp_path, step, content="old")
    publish(write(tmp_path, 10, "rolled back"))
    saving.tidy(tmp_path, 10, Retention(continued_from=10))
    assert names(tmp_path) == ["step-000010", "step-000020.abandoned"]
    save(tmp_path, 20, content="new")
    caplog.clear()
    publish(write(tmp_path, 20, "newer"))
    saving.tidy(tmp_path, 20, Retention(continued_from=10))
    assert names(tmp_path) == ["step-000010", "step-000020", "step-000020.abandoned"]
    assert content_of(tmp_path / "step-000020") == "newer"
    aside = tmp_path / "step-000020.abandoned"
    assert content_of(aside) == "new"
    assert caplog.messages == [
        "the run continued from an earlier step and saved step 20: the earlier checkpoint of step "
        f"20 is set aside as {aside}"
    ]


def test_latest_checkpoints_set_aside_stay(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        save(tmp_path, step, keep=9)
    save(tmp_path, 15, keep=2)
    aside = ["step-000040.abandoned", "step-000050.abandoned"]
    assert names(tmp_path) == ["step-000010", "step-000015", *aside]
    save(tmp_path, 45, keep=2)
    assert names(tmp_path) == ["step-000015", aside[0], "step-000045", aside[1]]


def test_permanent_checkpoints_set_aside_stay(tmp_path: Path) -> None:
    rules = Retention(last=1, every=20)
    for step in (10, 20, 30, 40, 50, 60, 70):
        publish(write(tmp_path, step, "first"))
        saving.tidy(tmp_path, step, rules)
    for step in (30, 40):  # of a branch that continues from step 20
        publish(write(tmp_path, step, "branch"))
        saving.tidy(tmp_path, step, replace(rules, continued_from=20))
    aside = [f"step-{step:06d}.abandoned" for step in (40, 60, 70)]
    assert names(tmp_path) == ["step-000020", "step-000040", *aside]
    publish(write(tmp_path, 65, "rolled back"))
    saving.tidy(tmp_path, 65, replace(rules, continued_from=20))
    assert "step-000060.abandoned" in names(tmp_path)


class Killed(BaseException):
    """The process stops here."""


def mortal(operation: Callable[..., Any], lives: Iterator[int]) -> Callable[..., Any]:
    """Return `operation`; it kills when no life is left, a removal only after one half."""

    def run(path: Path, *args: Any, **kwargs: Any) -> Any:
        if next(lives) > 0:
            return operation(path, *args, **kwargs)
        if operation is REMOVE_TREE:
            (path / "data").unlink(missing_ok=True)
        raise Killed

    return run


def killed_save(directory: Path, step: int, keep: int, content: str, lives: int) -> bool:
    """Save, but be killed after `lives` operations on the file system; return whether killed."""
    countdown = itertools.count(lives, -1)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [(Path, "mkdir"), (Path, "rename"), (shutil, "rmtree")]:
            patch.setattr(owner, name, mortal(getattr(owner, name), countdown))
        try:
            save(directory, step, keep, content)
        except Killed:
            return True
    return False


def found(directory: Path) -> tuple[int, str] | None:
    path = listing.latest(directory)
    if path is None:
        return None
    assert isinstance(path, Path)
    return int(path.name[5:11]), content_of(path)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_latest_survives_kill_at_any_operation(tmp_path: Path, step: int) -> None:
    """The latest checkpoint is the old or the new one, and the next save succeeds."""
    for lives in itertools.count():
        directory = tmp_path / str(lives)
        for earlier in (1, 2, 3):
            save(directory, earlier, keep=3, content="old")
        killed = killed_save(directory, step, 2, "new", lives)
        assert found(directory) in ((3, "old"), (step, "new"))
        assert all((path / "data").exists() for path in listing.checkpoints(directory).values())
        save(directory, step, keep=1, content="newer")
        assert found(directory) == (step, "newer")
        assert [n for n in names(directory) if "abandoned" not in n] == [f"step-{step:06d}"]
        if not killed:
            break
    assert lives > 3


def test_latest_survives_two_kills_during_rollback(tmp_path: Path) -> None:
    """The checkpoint that the first crash left without its replacement stays the latest."""
    for lives in itertools.count():
        directory = tmp_path / str(lives)
        for earlier in (1, 4):
            save(directory, earlier, keep=2, content="old")
        assert killed_save(directory, 4, 2, "lost", lives=3)
        assert names(directory) == ["step-000001", "step-000004.replaced", "step-000004.writing"]
        killed = killed_save(directory, 0, 2, "new", lives)
        assert found(directory) in ((4, "old"), (0, "new"))
        if not killed:
            break
    assert lives > 3


class CrashingSaves(RuleBasedStateMachine):
    """Saves that are killed at any one of their operations on the file system."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.contents = map(str, itertools.count())
        self.current: tuple[int, str] | None = None  # step and content of the latest checkpoint

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @rule(step=st.integers(0, 4), keep=st.integers(1, 3))
    def save(self, step: int, keep: int) -> None:
        self.current = (step, next(self.contents))
        save(self.directory, step, keep, self.current[1])
        assert len(listing.checkpoints(self.directory)) <= keep

    @rule(step=st.integers(0, 4), keep=st.integers(1, 3), lives=st.integers(0, 8))
    def crash(self, step: int, keep: int, lives: int) -> None:
        content = next(self.contents)
        killed_save(self.directory, step, keep, content, lives)
        latest = found(self.directory)
        assert latest in (self.current, (step, content))
        self.current = latest

    @invariant()
    def latest_is_the_last_one_saved(self) -> None:
        assert found(self.directory) == self.current


TestCrashingSaves = CrashingSaves.TestCase
TestCrashingSaves.settings = settings(max_examples=20, stateful_step_count=10, deadline=None)
