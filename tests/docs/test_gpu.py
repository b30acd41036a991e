"""The page on GPU benchmarks agrees with the code and the results."""

from __future__ import annotations

import re

from benchmarks import peak
from benchmarks.figures import ROOT, with_figures
from benchmarks.gpu import LARGE, LARGE_BYTES, jobs

PAGE = (ROOT / "docs" / "gpu.md").read_text()


def test_the_figures_are_those_of_the_results() -> None:
    assert "<!-- figures: every-gpu-result -->" in PAGE
    assert with_figures(PAGE) == PAGE


def test_the_table_is_what_runs() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| (\d+) \|", PAGE, flags=re.MULTILINE)
    assert [(job.name, str(job.limit)) for job in jobs("350m", LARGE)] == rows
    assert f"where the GPU has {LARGE_BYTES >> 30} GiB" in PAGE
    assert f"{peak._PRODUCT_SIZE} x {peak._PRODUCT_SIZE} matrices" in PAGE
