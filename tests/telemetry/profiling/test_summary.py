from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distmp.errors import ConfigError
from distmp.telemetry.profiling.breakdown import Breakdown
from distmp.telemetry.profiling.summary import Operator, RankSummary, Summary, longest

RANK = RankSummary(
    rank=0,
    host="node1",
    seconds=Breakdown(0.060, 0.010, 0.020, 0.005, 0.001, 0.004),
    idle_phase="update",
    operators=[Operator("aten::mm", 0.04, 12.0)],
    peak_bytes=3 << 20,
    peak_place="update of step 7",
)
SLOW = replace(
    RANK, rank=1, host="node2", seconds=Breakdown(0.060, 0.010, 0.001, 0.005, 0.020, 0.004)
)


def test_the_table_has_means_and_the_ranks_that_differ() -> None:
    summary = Summary(6, 8, [RANK, SLOW])
    assert summary.title == "steps 6 to 8 on 2 ranks, 100.0 ms a step"
    head, *rows = summary.table()
    assert head == ["", "ms a step", "share", "min", "max"]
    assert rows == [
        ["computation", "60.0", "60%", "", ""],
        ["communication, hidden", "10.0", "10%", "", ""],
        ["communication, exposed", "10.5", "10%", "1.0 (rank 1)", "20.0 (rank 0)"],
        ["optimizer", "5.0", "5%", "", ""],
        ["data", "10.5", "10%", "1.0 (rank 0)", "20.0 (rank 1)"],
        ["idle", "4.0", "4%", "", ""],
    ]
    assert summary.notes() == [
        "rank 1 on node2 slows down the others: its time without waiting is 19.0 ms "
        "a step longer, most of it data",
        "largest self time (rank 0): aten::mm 40.0 ms",
        "peak memory: 3.0 MiB, in update of step 7 (rank 0)",
    ]
    lines = summary.text().splitlines()
    assert len(lines) == 7 + 3
    assert lines[3] == "  communication, exposed       10.5    10%  1.0 (rank 1)  20.0 (rank 0)"
    assert all(line == line.rstrip() for line in lines)


def test_one_rank_alone() -> None:
    idle = replace(RANK, seconds=RANK.seconds._replace(idle=0.1), peak_bytes=None, operators=[])
    summary = Summary(6, 6, [idle])
    assert summary.title == "step 6 on one rank, 196.0 ms a step"
    assert {len(row) for row in summary.table()} == {3}
    assert summary.notes() == ["mostly idle in: update (rank 0)"]


def test_similar_ranks_are_not_distinguished() -> None:
    other = replace(SLOW, seconds=RANK.seconds._replace(computation=0.0605, exposed=0.0195))
    summary = Summary(6, 8, [RANK, other, other])
    assert {len(row) for row in summary.table()} == {3}
    assert not any("slows down" in note for note in summary.notes())


def test_write_and_read_round_trip(tmp_path: Path) -> None:
    summary = Summary(6, 8, [RANK, SLOW])
    summary.write(tmp_path / "summary.json")
    assert Summary.read(tmp_path / "summary.json") == summary


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"ranks": [1]}', '{"ranks": []}', "\xff"])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "summary.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not the summary of a profile") as caught:
        Summary.read(path)
    assert str(path) in str(caught.value)


def test_operators_are_summed_by_name() -> None:
    times = [
        ("mm", 3.0),
        ("add", 4.0),
        ("mm", 5.0),
        *((f"op{n:02}" + 80 * "x", 1.0) for n in range(30)),
    ]
    found = longest(times, steps=2)
    assert found[:2] == [Operator("mm", 4e-6, 1.0), Operator("add", 2e-6, 0.5)]
    assert len(found) == 20
    assert found[2].name == "op00" + 76 * "x"
