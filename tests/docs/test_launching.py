"""What docs/launching.md says of machines that find each other is what the launcher does."""

from __future__ import annotations

import re
from pathlib import Path

from distmp.distributed import limits
from distmp.distributed.rank_environment import MACHINES, PROCESSES, TORCHRUN
from distmp.launcher import plan
from distmp.launcher.hosts import _FORWARDED, read_hosts
from distmp.launcher.job import ENVIRONMENTS
from tests.launcher.test_job import POD, SRUN

PAGE_PATH = Path(__file__).parents[2] / "docs" / "launching.md"
PAGE = PAGE_PATH.read_text()


def test_environments_are_listed_in_order() -> None:
    section = PAGE.partition("\n## Several machines\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, flags=re.MULTILINE)
    assert tuple(name for name, _ in rows) == ENVIRONMENTS
    recorded = {"variables": {*TORCHRUN, *MACHINES[-1]}, "kubernetes": POD, "slurm": SRUN}
    for name, evidence in rows[:-1]:
        for variable in re.findall(r"`(\w+)`", evidence):
            assert variable in recorded[name]


def test_variables_are_listed_in_order() -> None:
    page = PAGE_PATH.with_name("schedulers.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| .* \|$", page, flags=re.MULTILINE)
    # PMIx has no number of processes, so `distmp launch` does not use it.
    sources = [row for row in (*MACHINES, *PROCESSES, TORCHRUN) if row.head]
    assert rows == [(row.size, row.rank, row.head) for row in sources]


def test_launch_page_numbers_agree_with_code() -> None:
    assert f"join_timeout={plan.join_timeout_seconds({})}" in PAGE
    assert f"read_timeout={plan.REJOIN_SECONDS}" in PAGE
    assert f"say so after {limits.SAY_AFTER_SECONDS:g} s" in PAGE
    assert f"between {plan._PORTS[0]} and {plan._PORTS[-1]}" in PAGE


def test_variables_passed_to_hosts_agree_with_code() -> None:
    (names,) = re.findall(r"passes on\n?\s*(.*?)\.\n", PAGE, flags=re.DOTALL)
    passed = re.findall(r"`(\w+)`", names)
    assert len(passed) == 7
    assert all(_FORWARDED.fullmatch(name) or _FORWARDED.fullmatch(f"{name}X") for name in passed)
    assert not _FORWARDED.fullmatch("PATH")
    for example in re.findall(r"`(node1[: ][^`]*)`", PAGE):
        (host,) = read_hosts(example)
        assert (host.name, host.ranks) == ("node1", 4)
