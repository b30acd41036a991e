"""A pytest plugin that writes the outcome of each test immediately; reads and counts outcomes.

If a run is killed at its time limit, the file has the outcomes of the tests that ended, and the
name of the test that was running.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pytest

_LONGEST_CAUSE = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the file."""
    parser.addoption("--outcomes", type=Path, help="file for one JSON line per test")


def pytest_configure(config: pytest.Config) -> None:
    """Register the writer of the file."""
    path = config.getoption("--outcomes")
    # Workers report to the process that started them.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(path))


class _Writer:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"test": nodeid, "outcome": "running"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            cause = cause_of_failure(report.longreprtext) if report.outcome == "failed" else ""
            self._write({"test": report.nodeid, "outcome": report.outcome, "cause": cause})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            cause = cause_of_failure(report.longreprtext)
            self._write({"test": report.nodeid, "outcome": "failed", "cause": cause})

    def _write(self, line: dict[str, str]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Outcomes(NamedTuple):
    """The outcomes of a run of tests.

    Attributes:
        passed: Number of tests that passed.
        failed: Number of tests that failed.
        skipped: Number of tests that were skipped.
        cause: The first test that failed, and why; empty if none did.
        running: The test that had not ended; empty if none.
    """

    passed: int
    failed: int
    skipped: int
    cause: str
    running: str

    @classmethod
    def read(cls, path: Path) -> Outcomes:
        """Read the file of a run; a missing file has no tests."""
        outcomes: dict[str, str] = {}
        cause = ""
        for text in path.read_text().splitlines() if path.exists() else ():
            line = json.loads(text)
            # A test that passed and fails at its teardown has failed.
            outcomes[line["test"]] = line["outcome"]
            if line["outcome"] == "failed" and not cause:
                cause = f"{line['test']}: {line['cause']}"
        count = Counter(outcomes.values())
        running = next((test for test, found in outcomes.items() if found == "running"), "")
        return cls(count["passed"], count["failed"], count["skipped"], cause, running)


def cause_of_failure(text: str) -> str:
    """Return why a test failed, from pytest's text: an assertion, an error of a rank, or a line."""
    lines = _lines(text)
    asserted = (line[1:].strip() for line in lines if line.startswith("E "))
    return _first([*asserted, *_errors(lines), *lines])


def cause_in(output: str) -> str:
    """Return the first error of an output: the end of its first traceback, or its last line."""
    lines = _lines(output)
    return _first([*_errors(lines), *lines[-1:]])


def _first(causes: list[str]) -> str:
    return causes[0][:_LONGEST_CAUSE] if causes else "no output"


def _lines(output: str) -> list[str]:
    """Return the lines that are not empty, without the name of the rank, which torch adds."""
    lines = [
        re.sub(r"^\[(rank|default)\d+\]: ?", "", line).rstrip() for line in output.splitlines()
    ]
    return [line for line in lines if line]


def _errors(lines: list[str]) -> Iterator[str]:
    """Yield the error at the end of each traceback, the first line that is not indented more."""
    for number, line in enumerate(lines):
        if line.lstrip().startswith("Traceback (most recent call last)"):
            indented = line[: len(line) - len(line.lstrip())] + " "
            for error in lines[number + 1 :]:
                if not error.startswith(indented):
                    yield error.strip()
                    break
