"""Compare the start of commands with `import torch`: `python -m benchmarks.command_start`.

Every command runs in a new process, up to its help or its message about a wrong setting. The
processor time of a process hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from benchmarks.report import in_turns, machine, save
from benchmarks.tables import runs as tables

TORCH = "import torch"
COMMANDS = {
    "`distmp train --help`": ["train", "--help"],
    "`distmp train`, wrong name of a setting": ["train", "--optim.learning-rte", "3"],
    "`distmp train`, wrong value": ["train", "--optim.lr", "abc"],
    "`distmp launch --help`": ["launch", "--help"],
    "`distmp launch`, wrong name of a setting": ["launch", "--", "--optim.learning-rte", "3"],
    "`distmp presets`": ["presets"],
    "`distmp explain --help`": ["explain", "--help"],
    "`distmp calibrate --help`": ["calibrate", "--help"],
    "`distmp export --help`": ["export", "--help"],
    "`distmp report --help`": ["report", "--help"],
}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    arguments = options.parse_args()
    seconds = in_turns([TORCH, *COMMANDS], arguments.rounds, measure)
    result = {"machine": machine(), "seconds": seconds}
    print(tables.command_start(result))
    print(f"saved to {save('command-start-cpu', result)}")
    return 0


def measure(name: str) -> float:
    """Return the processor time of a new process in seconds."""
    words = ["-c", TORCH] if name == TORCH else ["-m", "distmp", *COMMANDS[name]]
    before = os.times()
    # A wrong setting ends with code 2.
    done = subprocess.run([sys.executable, *words], capture_output=True)
    after = os.times()
    assert done.returncode in (0, 2), done.stderr.decode()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


if __name__ == "__main__":
    sys.exit(main())
