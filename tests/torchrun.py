"""Training runs as a user starts them: `torchrun -m distmp.train` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.progress import finished

TINY = [
    "--model.layers=2",
    "--model.dimension=32",
    "--model.heads=2",
    "--model.hidden=64",
    "--data.sequence-length=32",
    "--batch.global-batch-size=8",
    "--batch.microbatch-size=2",
    "--precision.policy=fp32",
    "--validation.final-samples=8",
    "--sample.length=8",
]
"""A run that takes seconds, once it has `--data.path`."""

SENTENCES = (
    "the quick brown fox jumps over the lazy dog\n",
    "def add(first, second):\n    return first + second\n",
)


def corpus(folder: Path) -> Path:
    """Write a few small files of text."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(12):
        (folder / f"text{number}.py").write_text(SENTENCES[number % 2] * 40)
    return folder


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def torchrun(*arguments: str, ranks: int = 2) -> list[str]:
    """The command line of `torchrun -m distmp.train`."""
    launcher = python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return [*launcher, "-m", "distmp.train", *arguments]


def environment() -> dict[str, str]:
    """The environment of a child: this checkout first on the path, one thread for each rank."""
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TERM": "dumb"}


def run(command: list[str], cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        command: What to run.
        cwd: Where.
        timeout: Seconds without progress, see `tests.progress`, after which it is killed.

    Raises:
        subprocess.TimeoutExpired: Without progress.
    """
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        stdout, stderr = finished(process, timeout)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
