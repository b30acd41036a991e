"""The table of checks on the page is the one of the code."""

from __future__ import annotations

import inspect
import re
import runpy

from benchmarks.figures import ROOT
from distmp.commands.doctor import CHECKS
from distmp.distributed.limits import ARRIVAL_SECONDS
from distmp.training import preflight
from distmp.training.callbacks import stragglers
from distmp.training.failures import PREFLIGHT_SECONDS
from distmp.utils import environment_info as circumstances
from distmp.utils.files import TOTAL_BYTES

PAGE = (ROOT / "docs" / "checks.md").read_text()


def test_checks_table_is_generated() -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "check_table.py"))
    assert script["with_table"](PAGE) == PAGE


# What the page on checks says of machines agrees with the code; other tests show it.


WELL, ALL_WELL, RUNNING = re.split(
    "## (?:Check all machines|Slow ranks)\n", PAGE.partition("## Check this machine\n")[2]
)
ALL_WELL = " ".join(ALL_WELL.split())


def test_listed_checks_agree_with_doctor() -> None:
    assert re.findall(r"^\| `([\w ]+)` \|", WELL, flags=re.MULTILINE) == [*CHECKS]


def test_page_numbers_agree_with_code() -> None:
    assert f"after {PREFLIGHT_SECONDS:g} seconds without progress of any rank" in ALL_WELL
    assert f"within {ARRIVAL_SECONDS:g} seconds" in ALL_WELL
    assert f"{TOTAL_BYTES >> 20} MiB on each machine" in ALL_WELL
    assert f"better link is {preflight.SLOW_LINK:g} x slower" in ALL_WELL
    assert f"Every {stragglers.StragglerDetection.every} steps" in RUNNING
    assert f"takes {stragglers.SLOW} x the median of the others twice in a row" in " ".join(
        RUNNING.split()
    )


def test_versions_on_page_agree_with_compared() -> None:
    told = re.search(r"versions \(([\w, ]+)\)", ALL_WELL)
    assert told is not None
    assert {name.lower() for name in told[1].split(", ")} == circumstances.versions().keys()


def test_messages_on_page_agree_with_code() -> None:
    told: list[str] = []
    detector = stragglers.SlowRankDetector(["rank 0 on node1", "rank 1 on node2"], told.append)
    for step, seconds in ((150, 0.412), (200, 0.412), (400, 0.229)):
        detector.update(step, [0.229, seconds])
    (block,) = re.findall(r"```text\n(.*?)```", RUNNING, flags=re.DOTALL)
    assert told == block.splitlines()
    assert "{name} differs: " in inspect.getsource(preflight)
