from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from distmp.telemetry.console import progress_line
from tests.telemetry.samples import record


def test_all_fields() -> None:
    assert progress_line(record(120, skipped_total=3), 5000, 221.0) == (
        "step  120/5000  loss   2.3456      3:41 left  12.3k tok/s  norm    0.987"
        "  skipped   3  scale  2^16  lr 3.00e-04   1.2 GiB"
    )


def test_notes_come_last_so_that_columns_stay() -> None:
    plain = progress_line(record(7), 100, 60.0)
    metrics = {"accuracy": 0.75}
    validated = record(7, skipped=True, validation_loss=2.5, validation_metrics=metrics)
    noted = progress_line(validated, 100, 60.0)
    assert noted == plain + "  validation loss 2.5000  accuracy 0.7500  this step skipped"


_SOME = st.sampled_from([0.0, 1e-7, 0.5, 9.99, 123.456, 999.9, 1e5, 1e38, math.inf, math.nan])


@given(_SOME, _SOME, st.integers(-14, 24), st.integers(0, 999), st.floats(0, 1e7))
def test_columns_do_not_move(
    loss: float, norm: float, exponent: int, skips: int, left: float
) -> None:
    typical = progress_line(record(1), 5000, 60.0)
    other = record(4999, loss=loss, grad_norm=norm, loss_scale=2.0**exponent, skipped_total=skips)
    line = progress_line(other, 5000, left)
    assert line.isascii()
    for word in ("loss", "tok/s", "lr", "norm", "scale", "skipped", "left"):
        assert line.index(word) == typical.index(word)
