"""Runs the commands of the README and of docs/, in order, and checks the quickstart's claim.

Those of the README run in an empty directory, as after `pip install`; `make` and the commands of
docs/ run in the clone.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
# The README trains the quickstart, whose results the pages read; its page comes next.
FIRST = [README, QUICKSTART]
PAGES = [*FIRST, *(page for page in sorted((ROOT / "docs").glob("*.md")) if page not in FIRST)]
# Run by .ci/run itself, or recorded: benchmarks write the figures that tests compare pages with.
ELSEWHERE = re.compile(r"make test|.* -m benchmarks[ .].*")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="readme-") as empty:
        for page in PAGES:
            for command in commands(page):
                in_clone = page != README or command.startswith("make ")
                run(command, ROOT if in_clone else Path(empty))
    return check_quickstart()


def commands(page: Path) -> Iterator[str]:
    """Yield the commands and the Python blocks of a page."""
    for language, block in re.findall(r"```(bash|python)\n(.*?)```", page.read_text(), re.DOTALL):
        if language == "python":
            yield f"{'' if page == README else '.venv/bin/'}python -c {shlex.quote(block)}"
            continue
        yield from (line for line in block.strip().splitlines() if not ELSEWHERE.fullmatch(line))


def run(command: str, directory: Path) -> None:
    print(f"$ {command}", flush=True)
    started = time.monotonic()
    installed = {"PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, shell=True, cwd=directory, env={**os.environ, **installed}, check=True)
    print(f"({time.monotonic() - started:.0f} s)", flush=True)


def check_quickstart() -> int:
    """Compare the validation loss that the page claims with that of the run just made."""
    claim = re.search(r"ends below ([\d.]+) nats per\s+byte", QUICKSTART.read_text())
    claimed = float(claim[1])  # type: ignore[index]
    newest = max((ROOT / "runs").glob("quickstart*/steps.jsonl"), key=lambda p: p.stat().st_mtime)
    records = [json.loads(line) for line in newest.read_text().splitlines()]
    measured = min(r["validation_loss"] for r in records if r.get("validation_loss") is not None)
    seconds = sum(record["step_seconds"] for record in records)
    print(f"quickstart: {measured:.3f} nats per byte after {seconds:.0f} s of training")
    if measured >= claimed:
        print(f"docs/quickstart.md claims less than {claimed}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
