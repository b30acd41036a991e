from __future__ import annotations

from pathlib import Path

import pytest

from distmp.config import load
from distmp.errors import ConfigError
from distmp.telemetry.settings import LogConfig, ProfileConfig


def test_interval_of_lines_is_at_least_one_step() -> None:
    with pytest.raises(ConfigError, match=r"log\.every = 0: use 1 or more"):
        LogConfig(every=0)


@pytest.mark.parametrize(
    ("steps", "window"),
    [
        (None, range(0)),
        (7, range(7, 8)),
        ("7", range(7, 8)),
        ("7:7", range(7, 8)),
        (" 20:25", range(20, 26)),
        ("1:100", range(1, 101)),
    ],
)
def test_profile_steps_start_at_1_and_include_last(steps: int | str | None, window: range) -> None:
    assert list(ProfileConfig(steps).window) == list(window)


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ("0:3", "steps are counted from 1"),
        (0, "steps are counted from 1"),
        (-1, "write the first and the last step, as in 20:25"),
        ("9:5", "write 5:9"),
        ("1:101", "record at most 100 steps"),
        ("", "write the first"),
        ("5-9", "write the first"),
        (":9", "write the first"),
        ("1:2:3", "write the first"),
        ("x", "write the first"),
        ("9" * 5000, "write the first"),
    ],
)
def test_invalid_profile_steps_are_one_message(steps: int | str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ProfileConfig(steps)
    shown = repr(steps) if len(str(steps)) < 100 else f"'{steps[:20]}"
    assert str(caught.value).startswith(f"profile.steps = {shown}")
    assert f": {problem}" in str(caught.value)


def test_profile_steps_on_command_line() -> None:
    assert load(["--profile.steps", "20:25"]).profile.window == range(20, 26)
    assert load(["--profile.steps=20", "--steps=100"]).profile.window == range(20, 21)
    with pytest.raises(ConfigError, match=r"profile\.steps = '20:25': the run ends with step 24"):
        load(["--profile.steps=20:25", "--steps=24", "--schedule.warmup-steps=0"])
    with pytest.raises(ConfigError, match=r"profile\.steps = 'x'"):
        load(["--profile.steps=x"])


def test_profile_steps_in_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for text, window in (("20:25", range(20, 26)), ("20", range(20, 21)), ("null", range(0))):
        path.write_text(f"profile:\n  steps: {text}\n")
        assert load(["--config", str(path)]).profile.window == window
