"""The page on profiling shows the lines of a profile."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from distmp.telemetry.profiling.breakdown import Breakdown
from distmp.telemetry.profiling.summary import NAMES, Operator, RankSummary, Summary

PAGE = (Path(__file__).parents[2] / "docs" / "profiling.md").read_text()
FIRST = RankSummary(
    rank=0,
    host="node1",
    seconds=Breakdown(0.5, 0.05, 0.01, 0.01, 0.01, 0.1),
    idle_phase="backward of microbatch 1",
    operators=[Operator("aten::mm", 0.2, 10.0), Operator("aten::mul", 0.1, 10.0)],
    peak_bytes=5 << 20,
    peak_place="backward of microbatch 1 of step 22",
)
OTHER = replace(FIRST, rank=1, seconds=FIRST.seconds._replace(computation=0.41, exposed=0.1))


def test_the_sample_has_the_lines_of_a_summary() -> None:
    summary = Summary(20, 25, [FIRST, OTHER])
    lines = [f"profile of {summary.title}; in runs/profiled/profile:", *summary.text().splitlines()]
    (sample,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    shown = sample.splitlines()
    assert len(shown) == len(lines)
    for expected, line in zip(shown, lines, strict=True):
        pattern = re.escape(" ".join(expected.split())).replace(r"\.\.\.", ".+")
        assert re.fullmatch(pattern, " ".join(line.split())), (expected, line)


def test_every_part_is_explained() -> None:
    assert set(re.findall(r"^\| ([a-z, ]+) \| ", PAGE, flags=re.MULTILINE)) >= set(NAMES.values())
