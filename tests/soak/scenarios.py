"""Measures what happens in each kind of fault, and writes the tables of the documents.

python -m tests.soak.scenarios          measure all of them again
python -m tests.soak.scenarios --table  only write the tables from the kept results
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.launcher.two_hosts import NAMES
from tests.soak.cluster import (
    CHECKPOINT_EVERY,
    Cluster,
    check_result,
    cluster,
    messages,
    undisturbed,
)

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent / "scenarios.json"
DOCUMENTS = {"kills": ROOT / "docs" / "faults.md", "cuts": ROOT / "docs" / "launching.md"}
STEPS = 400
SETTINGS = [f"--steps={STEPS}"]
# Scenarios that run side by side; they wait most of the time.
WORKERS = 3
RESTARTS = "--max-restarts=3"


@dataclass(frozen=True)
class Scenario:
    """A fault of a run on two hosts.

    Attributes:
        table: The table that it belongs to.
        what: What happens, for the table.
        options: Options of the launcher.
        act: Causes the fault.
    """

    table: str
    what: str
    options: tuple[str, ...]
    act: Callable[[Cluster], None]


@dataclass(frozen=True)
class Outcome:
    """What a fault led to.

    Attributes:
        table: The table that it belongs to.
        what: What happens.
        options: Options of the launcher.
        seconds: Seconds from the fault to the first message; None without one.
        message: That message.
        host: The host that printed it.
        continues: Whether training continued, with the weights of an undisturbed run.
        restarts: How often ranks were started again.
        ended: Seconds until all hosts had ended, if training did not continue.
    """

    table: str
    what: str
    options: tuple[str, ...]
    seconds: float | None
    message: str
    host: str
    continues: bool
    restarts: int
    ended: float | None


def kill(host: int, what: str, start_again: bool = False) -> Callable[[Cluster], None]:
    def act(run: Cluster) -> None:
        run.kill(host, what)
        if start_again:
            run.restart(host)

    return act


def cut(seconds: float) -> Callable[[Cluster], None]:
    def act(run: Cluster) -> None:
        run.cut(1)
        until = time.monotonic() + seconds
        # Reconnected by `_observe`, which watches the output meanwhile.
        run.undo = lambda: time.monotonic() > until and run.reconnect(1) is None

    return act


SCENARIOS = [
    Scenario("kills", "a rank on the second host is killed", (), kill(1, "rank")),
    Scenario("kills", "a rank on the second host is killed", (RESTARTS,), kill(1, "rank")),
    Scenario(
        "kills",
        "all processes of the second host are killed, and its launcher is started again",
        (RESTARTS,),
        kill(1, "host", start_again=True),
    ),
    Scenario("kills", "all processes of the first host are killed", (RESTARTS,), kill(0, "host")),
    *(
        Scenario("cuts", f"the connection is cut for {seconds} s", options, cut(seconds))
        for seconds in (5, 30, 90)
        for options in ((), (RESTARTS,))
    ),
]


def measure(scenario: Scenario, directory: Path, expected: dict[str, torch.Tensor]) -> Outcome:
    """Run a scenario and check its result."""
    with cluster(2, directory, list(scenario.options), SETTINGS) as run:
        run.start()
        run.wait_for(lambda: run.step() > 2 * CHECKPOINT_EVERY)
        before = [len(run.text(host)) for host in range(run.count)]
        began = time.monotonic()
        scenario.act(run)
        seconds, message, host = _observe(run, before, began)
        continues = all(agent.process.returncode == 0 for agent in run.agents)
        if continues:
            check_result(run, expected, STEPS)
        return Outcome(
            scenario.table,
            scenario.what,
            scenario.options,
            seconds,
            message,
            host,
            continues,
            restarts=len(re.findall(r"^restart \d", run.text(0), flags=re.MULTILINE)),
            ended=None if continues else round(time.monotonic() - began),
        )


def _observe(run: Cluster, before: list[int], began: float) -> tuple[float | None, str, str]:
    """Wait for the end of all launchers; return the first message, and when and where it came."""
    first: tuple[float | None, str, str] = (None, "", "")
    while run.running() or run.undo is not None:
        if run.undo is not None and run.undo():
            run.undo = None
        for host in range(run.count):
            found = messages(run.text(host)[before[host] :])
            if found and first[0] is None:
                first = (round(time.monotonic() - began), found[0], NAMES[host])
        assert time.monotonic() - began < 600, run.report()
        time.sleep(0.2)
    return first


def table(outcomes: list[Outcome]) -> str:
    """Return a table of outcomes in Markdown."""
    lines = ["| what happens | `--max-restarts` | first message | training |", "|---|---|---|---|"]
    for outcome in outcomes:
        if outcome.seconds is None:
            said = "none"
        else:
            text = re.sub(r"^distmp(?: launch)?: ", "", outcome.message)
            said = f"after {outcome.seconds:g} s, on `{outcome.host}`: {text}"
        restarted = "yes" if outcome.options else "no"
        lines.append(f"| {outcome.what} | {restarted} | {said} | {_training(outcome)} |")
    return "\n".join(lines)


def _training(outcome: Outcome) -> str:
    if not outcome.continues:
        return f"ends on all hosts within {outcome.ended:g} s"
    return "continues from the last checkpoint" if outcome.restarts else "continues"


def with_tables(text: str, outcomes: list[Outcome]) -> str:
    """Return a document with its tables made from the outcomes."""

    def fill(match: re.Match[str]) -> str:
        rows = [outcome for outcome in outcomes if outcome.table == match[1]]
        return f"<!-- scenarios: {match[1]} -->\n{table(rows)}\n<!-- end of scenarios -->"

    return re.sub(
        r"<!-- scenarios: (\w+) -->.*?<!-- end of scenarios -->", fill, text, flags=re.DOTALL
    )


def kept() -> list[Outcome]:
    """Return the kept results."""
    entries = json.loads(KEPT.read_text())
    return [Outcome(**{**entry, "options": tuple(entry["options"])}) for entry in entries]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.scenarios", description=__doc__)
    parser.add_argument("--table", action="store_true")
    if not parser.parse_args().table:
        with tempfile.TemporaryDirectory(prefix="scenarios-") as name:
            directory = Path(name)
            expected = undisturbed(directory / "undisturbed", 2, SETTINGS)
            with ThreadPoolExecutor(WORKERS) as pool:
                outcomes = list(
                    pool.map(
                        lambda item: measure(item[1], directory / f"scenario {item[0]}", expected),
                        enumerate(SCENARIOS),
                    )
                )
        KEPT.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    for document in DOCUMENTS.values():
        document.write_text(with_tables(document.read_text(), kept()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
