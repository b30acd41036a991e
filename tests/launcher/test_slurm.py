"""launch/slurm.sbatch on a real Slurm with two nodes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distmp.train import main
from tests import slurm
from tests.ranks import run_ranks
from tests.slurm import Cluster, wait_until
from tests.torchrun import TINY, corpus
from tests.two_hosts import NAMES

ROOT = Path(__file__).parent.parent.parent
CONFIG = ["--config", str(ROOT / "configs" / "quickstart.yaml")]
STEPS = 60

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = slurm.why_not()
    if reason is not None:
        pytest.skip(reason)
    with slurm.cluster() as running:
        yield running


def settings(folder: Path) -> list[str]:
    """A run of seconds, which has the same bits on any number of ranks."""
    return [
        *TINY,
        f"--data.path={corpus(folder / 'corpus')}",
        f"--steps={STEPS}",
        "--reproducible",
        "--validation.every=0",
        "--schedule.warmup-steps=5",
    ]


def submit(cluster: Cluster, log: Path, *words: str, **variables: str) -> str:
    """Submit the job file as it is and return the job's number."""
    variables = {"PYTHON": sys.executable, "PET_NPROC_PER_NODE": "1", **variables}
    command = ["sbatch", "--parsable", f"--output={log}", "launch/slurm.sbatch", *words]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables.update(PYTHONPATH=path, OMP_NUM_THREADS="1")
    return cluster.run(*command, cwd=ROOT, **variables).strip()


def steps_made(records: Path) -> int:
    return records.read_text().count("\n") if records.exists() else 0


def losses(records: Path) -> list[tuple[int, float]]:
    lines = records.read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def train_alone(arguments: list[str]) -> None:
    """Train without a process group, in a process of its own."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    assert main(arguments) == 0


def test_a_warned_job_goes_back_in_the_queue_and_ends_as_if_never_stopped(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = settings(tmp_path)
    run, log = tmp_path / "run", tmp_path / "log"
    job = submit(cluster, log, *options, f"--run-dir={run}")

    def told() -> str:
        return f"{log.read_text() if log.exists() else ''}\n{cluster.job(job)}"

    wait_until(lambda: steps_made(run / "steps.jsonl") >= 3, 100, told)
    assert "node[1-2]" in cluster.run("squeue", "-hs", "-o", "%N", "-j", job).split()
    # As Slurm itself does it when the time is nearly up: to all processes of the job's steps.
    cluster.run("scancel", "--signal=USR1", job)
    wait_until(lambda: cluster.job(job)["JobState"] == "PENDING", 60, told)
    assert cluster.job(job)["Restarts"] == "1"
    stopped_after = losses(run / "steps.jsonl")[-1][0]
    assert stopped_after < STEPS
    assert (run / "checkpoints" / f"step-{stopped_after:06}").is_dir()

    wait_until(lambda: cluster.job(job)["JobState"] == "COMPLETED", 100, told)
    assert cluster.job(job)["Restarts"] == "1"
    assert log.read_text().count("ranks: 2 on cpu") == 2
    alone = tmp_path / "alone"
    run_ranks(train_alone, 1, [*CONFIG, *options, f"--run-dir={alone}"], initialize=False)
    assert losses(run / "steps.jsonl") == losses(alone / "steps.jsonl")
    assert len(losses(run / "steps.jsonl")) == STEPS


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (1, "FAILED"), (2, "FAILED")])
def test_only_an_orderly_stop_goes_back_in_the_queue(
    code: int, state: str, cluster: Cluster, tmp_path: Path
) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(
        f'#!/bin/sh\nprintf "%s|" "$(hostname)" "$PET_NPROC_PER_NODE" "$@"\nexit {code}\n'
    )
    launcher.chmod(0o755)
    log = tmp_path / "log"
    job = submit(cluster, log, "--data.path=a folder", PYTHON=str(launcher))
    wait_until(lambda: cluster.job(job)["JobState"] == state, 30, cluster.logs)
    ended = cluster.job(job)
    assert (ended["ExitCode"], ended["Restarts"]) == (f"{code}:0", "0")
    words = "1|-m|distmp|launch|--|--resume=auto|--config|configs/quickstart.yaml|"
    for node in NAMES:
        assert log.read_text().count(f"{node}|{words}--data.path=a folder|") == 1
