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
from tests.slurm import Cluster, wait_until
from tests.torchrun import TINY, corpus

ROOT = Path(__file__).parent.parent.parent
CONFIG = ["--config", "configs/quickstart.yaml"]
STEPS = 100

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


def submit(cluster: Cluster, log: Path, *words: str) -> str:
    """Submit the job file as it is and return the job's number."""
    command = ["sbatch", "--parsable", f"--output={log}", "launch/slurm.sbatch", *words]
    return cluster.run(
        *command,
        cwd=ROOT,
        PYTHON=sys.executable,
        PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        OMP_NUM_THREADS="1",
        PET_NPROC_PER_NODE="1",
    ).strip()


def losses(records: Path) -> list[tuple[int, float]]:
    lines = records.read_text().splitlines() if records.exists() else []
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def test_a_warned_job_goes_back_in_the_queue_and_ends_as_if_never_stopped(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = settings(tmp_path)
    run, log = tmp_path / "run", tmp_path / "log"
    job = submit(cluster, log, *options, f"--run-dir={run}")

    def told() -> str:
        return f"{log.read_text() if log.exists() else ''}\n{cluster.job(job)}"

    wait_until(lambda: len(losses(run / "steps.jsonl")) >= 5, 100, told)
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
    monkeypatch.chdir(ROOT)
    alone = tmp_path / "alone"
    assert main([*CONFIG, *options, f"--run-dir={alone}"]) == 0
    assert losses(run / "steps.jsonl") == losses(alone / "steps.jsonl")
    assert len(losses(run / "steps.jsonl")) == STEPS


def test_a_wrong_configuration_ends_the_job_with_one_message(
    cluster: Cluster, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    job = submit(cluster, log, "--optim.lr=fast")
    wait_until(lambda: cluster.job(job)["JobState"] == "FAILED", 60, cluster.logs)
    assert cluster.job(job)["ExitCode"] == "2:0"
    assert cluster.job(job)["Restarts"] == "0"
    assert "optim.lr = 'fast': must be a number" in log.read_text()
    assert "Traceback" not in log.read_text()
