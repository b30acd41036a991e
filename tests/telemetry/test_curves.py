from __future__ import annotations

import math
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distmp.telemetry.curves import draw_curves
from distmp.telemetry.records import StepRecord
from tests.telemetry.samples import record

_SKIP_COLOR = (0xD5 / 255, 0x5E / 255, 0)


def _run(steps: int, **changes: Any) -> list[StepRecord]:
    return [record(s, loss=2 + 8 / s, **changes) for s in range(1, steps + 1)]


def _picture(path: Path) -> np.ndarray[Any, Any]:
    from matplotlib.image import imread

    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    return np.asarray(imread(path))[..., :3]


_CASES = {
    "one": _run(1),
    "two": _run(2),
    "normal": _run(300),
    "static scale of one": _run(100, loss_scale=1.0),
    "nothing finite": _run(
        20,
        grad_norm=math.inf,
        learning_rate=math.nan,
        loss_scale=math.inf,
        validation_loss=math.nan,
    ),
    "loss never finite": [record(s, loss=math.nan, skipped=True) for s in range(1, 50)],
    "gaps": [record(s, loss=math.nan if s % 3 else 2.0, grad_norm=0.0) for s in range(1, 50)],
    "all zero": _run(5, grad_norm=0.0, learning_rate=0.0, loss_scale=0.0),
    "negative": [record(s, loss=-float(s), validation_loss=-1.0) for s in range(1, 50)],
    "huge": [record(s, loss=10.0 ** (s * 6), grad_norm=10.0 ** (6 * s)) for s in range(1, 51)],
    "many": _run(20_000),
}


def test_a_metric_has_a_panel(tmp_path: Path) -> None:
    values = {"accuracy": 0.5, "ema_accuracy": math.nan, "ema_loss": 2.0}
    records = [record(s, validation_metrics=values if s % 5 == 0 else None) for s in range(1, 21)]
    assert draw_curves(records, tmp_path / "curves.png")
    height, width, _ = _picture(tmp_path / "curves.png").shape
    assert (width, height) == (1100, 1210 + 2 * 220)


@pytest.mark.parametrize("case", _CASES)
def test_draws(tmp_path: Path, case: str) -> None:
    path = tmp_path / "curves.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw_curves(_CASES[case], path)
    height, width, _ = _picture(path).shape
    assert (width, height) == (1100, 1210)
    assert list(tmp_path.iterdir()) == [path]


def test_without_records_nothing_is_written(tmp_path: Path) -> None:
    assert not draw_curves([], tmp_path / "curves.png")
    assert list(tmp_path.iterdir()) == []


def test_replaces_an_older_picture(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    path.write_bytes(b"old")
    assert draw_curves(_run(3), path)
    _picture(path)


def test_skipped_steps_are_marked_where_they_happened(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    records = [record(s, skipped=s in (300, 700)) for s in range(1, 1001)]
    draw_curves(records, path)
    # The strip above the lowest axis that contains the marks.
    strip = _picture(path)[1110:1150]
    near = np.abs(strip - _SKIP_COLOR).sum(axis=-1) < 0.3
    columns = np.flatnonzero(near.any(axis=0))
    groups = np.split(columns, np.flatnonzero(np.diff(columns) > 5) + 1)
    assert len(groups) == 2
    left, right = (group.mean() / 1100 for group in groups)
    assert right - left == pytest.approx(0.4 * 0.92, abs=0.03)


def test_does_not_change_global_state() -> None:
    script = """
import sys, tempfile, matplotlib
from distmp.telemetry.curves import draw_curves
from tests.telemetry.samples import record
# Asking for "backend" would itself import pyplot.
settings = lambda: {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != "backend"}
before = settings()
draw_curves([record(1), record(2)], tempfile.mkdtemp() + "/curves.png")
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
