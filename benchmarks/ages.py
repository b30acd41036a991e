"""Recorded results that are older than the code they measure: `python -m benchmarks.ages`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import NAME, ROOT
from benchmarks.report import RESULTS

# Directories whose code a benchmark measures, by the name of its result; others measure `distmp`.
MEASURES: dict[str, tuple[str, ...]] = {
    "accumulation-passes": ("distmp/buckets",),
    "activation-checkpointing": ("distmp/models", "distmp/parallel"),
    "checkpoint-stall": ("distmp/checkpoint", "distmp/engine"),
    "loss": ("distmp/models",),
    "muon": ("distmp/optim", "distmp/parallel"),
    "step-tail": ("distmp/engine", "distmp/optim", "distmp/scaling"),
}


def older() -> list[str]:
    """Return a line for each recorded result that is older than the code it measures."""
    problems = {path.name: _problem(path) for path in sorted(RESULTS.glob("*.json"))}
    lines = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    return lines or ["every recorded result is newer than the code it measures"]


def _problem(path: Path) -> str:
    match = NAME.fullmatch(path.stem)
    measures = MEASURES.get(match["table"] if match else "", ("distmp",))
    commit = json.loads(path.read_text())["machine"].get("commit")
    if commit is None:
        return "no commit is recorded"
    if commit.endswith("-dirty"):
        return f"recorded from {commit}, with changes that were not committed"
    command = ["git", "log", "--oneline", f"{commit}..HEAD", "--", *measures]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return f"recorded from {commit}, which this repository does not have"
    count = len(done.stdout.splitlines())
    return f"{count} commits since {commit} change {', '.join(measures)}" if count else ""


def main() -> int:
    print("\n".join(older()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
