"""Starts training runs like a user: `torchrun -m distmp.train` in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.progress import finished

SIZES = "layers: 2, dimension: 32, heads: 2, hidden: 64"
TINY = [
    f"--model.options={{{SIZES}}}",
    "--data.sequence-length=32",
    "--batch.global-batch-size=8",
    "--batch.microbatch-size=2",
    "--precision.policy=fp32",
    "--validation.final-samples=8",
]
"""Arguments of a run that takes seconds; `--data.path` has to be added."""

SENTENCES = (
    "the quick brown fox jumps over the lazy dog\n",
    "def add(first, second):\n    return first + second\n",
)


def corpus(directory: Path) -> Path:
    """Write a few small files of text."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(12):
        (directory / f"text{number}.py").write_text(SENTENCES[number % 2] * 40)
    return directory


def tiny(directory: Path, *more: str) -> list[str]:
    """Return arguments of a tiny run in `run`, on text that is written to `directory`/corpus."""
    return [*TINY, f"--data.path={corpus(directory / 'corpus')}", "--run-dir=run", *more]


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def torchrun(*arguments: str, ranks: int = 2) -> list[str]:
    """Return the command line of `torchrun -m distmp.train`."""
    launcher = python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return [*launcher, "-m", "distmp.train", *arguments]


def environment() -> dict[str, str]:
    """Return the environment of a child: this checkout first on the path, one thread per rank."""
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TERM": "dumb"}


def run(
    command: list[str], cwd: Path, timeout: float = 100, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        command: What to run.
        cwd: Where.
        timeout: Seconds without progress, see `tests.progress`, after which it is killed.
        variables: Environment variables beside those of `environment`.

    Raises:
        subprocess.TimeoutExpired: Without progress.
    """
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**environment(), **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        stdout, stderr = finished(process, timeout)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
