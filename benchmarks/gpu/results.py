"""The results of jobs, and their summary, which is written whenever a result changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import table
from distmp.utils.files import replacing

NOT_REACHED = "not reached"
RUNNING = "running"
PASSED = "passed"
FAILED = "failed"


@dataclass(frozen=True)
class Result:
    """The result of a job.

    Attributes:
        slice: Number of its slice, from 1.
        job: Name of the job.
        limit: Its time limit in seconds.
        outcome: PASSED, FAILED, RUNNING (also if this command was killed) or NOT_REACHED.
        seconds: How long it took.
        tests: How many tests passed, failed and were skipped; None for a benchmark.
        cause: The first failure; empty without one.
        machine: Hardware, versions and date; empty before it ran.
    """

    slice: int
    job: str
    limit: int
    outcome: str = NOT_REACHED
    seconds: float = 0.0
    tests: tuple[int, int, int] | None = None
    cause: str = ""
    machine: str = ""

    def row(self) -> dict[str, object]:
        """Return the row of the summary."""
        passed, failed, skipped = self.tests or ("", "", "")
        return {
            "slice": self.slice,
            "job": self.job,
            "result": self.outcome,
            "seconds": f"{self.seconds:.0f} of {self.limit}",
            "passed": passed,
            "failed": failed,
            "skipped": skipped,
            "first cause": self.cause.replace("|", "\\|"),
        }


class Summary:
    """The results in a directory: those of this run, and earlier ones of other jobs.

    Args:
        directory: Gets `summary.json` and `summary.md`.

    Attributes:
        directory: The directory.
        results: The results, slice by slice.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._json = directory / "summary.json"
        read = json.loads(self._json.read_text()) if self._json.exists() else []
        self.results = [Result(**fields) for fields in read]

    def result(self, job: str) -> Result:
        """Return the result of a job."""
        return next(result for result in self.results if result.job == job)

    def put(self, *results: Result) -> None:
        """Add results, which replace earlier ones of the same jobs, and write the files."""
        by_job = {result.job: result for result in (*self.results, *results)}
        self.results = sorted(by_job.values(), key=lambda result: result.slice)
        stored = json.dumps([asdict(result) for result in self.results], indent=2)
        for path, text in (
            (self._json, stored),
            (self.directory / "summary.md", self.text(self.results)),
        ):
            with replacing(path) as file:
                file.write(text.encode())

    @staticmethod
    def text(results: Sequence[Result]) -> str:
        """Return results as a Markdown table, with the number of each outcome and the machine."""
        counts = [
            f"{number} {outcome}"
            for outcome in (PASSED, FAILED, RUNNING, NOT_REACHED)
            if (number := sum(result.outcome == outcome for result in results))
        ]
        machines = dict.fromkeys(result.machine for result in results if result.machine)
        rows = [result.row() for result in results]
        return "\n\n".join([table(rows), f"Jobs: {', '.join(counts)}.", *machines]) + "\n"
