"""Test launch/slurm.sbatch on a real Slurm cluster with two nodes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from distmp.distributed.rank_environment import RankEnvironment
from distmp.train import main
from tests import slurm
from tests.ranks import run_ranks
from tests.slurm import Cluster, wait_until
from tests.torchrun import TINY, corpus
from tests.two_hosts import NAMES

ROOT = Path(__file__).parent.parent.parent
CONFIG = ["--config", str(ROOT / "configs" / "quickstart.yaml")]
STEPS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = slurm.why_not()
    if reason is not None:
        pytest.skip(reason)
    with slurm.cluster() as running:
        yield running


def settings(directory: Path) -> list[str]:
    """Return settings of a run that takes seconds and is bit-identical on any number of ranks."""
    return [
        *TINY,
        f"--data.path={corpus(directory / 'corpus')}",
        f"--steps={STEPS}",
        "--reproducible",
        "--validation.every=0",
        "--schedule.warmup-steps=5",
    ]


def submit(
    cluster: Cluster, log: Path, run: list[str], options: tuple[str, ...] = (), **variables: str
) -> str:
    """Submit the unchanged job file and return the job's id."""
    command = ["sbatch", "--parsable", f"--output={log}", *options, "launch/slurm.sbatch", *run]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    return cluster.run(*command, cwd=ROOT, **variables).strip()


def stub(path: Path, script: str) -> str:
    """Write a script that replaces the launcher; return its path."""
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return str(path)


def steps_made(records: Path) -> int:
    return records.read_text().count("\n") if records.exists() else 0


def losses(records: Path) -> list[tuple[int, float]]:
    lines = records.read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def train_alone(arguments: list[str]) -> None:
    """Train without a process group."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    assert main(arguments) == 0


@pytest.mark.nightly
def test_signaled_job_requeues_and_resumes_identically(cluster: Cluster, tmp_path: Path) -> None:
    options = settings(tmp_path)
    run, log = tmp_path / "run", tmp_path / "log"
    job = submit(
        cluster, log, [*options, f"--run-dir={run}"], PYTHON=sys.executable, PET_NPROC_PER_NODE="1"
    )

    wait_until(lambda: steps_made(run / "steps.jsonl") >= 3, log.read_text)
    assert "node[1-2]" in cluster.run("squeue", "-hs", "-o", "%N", "-j", job).split()
    # Slurm sends it shortly before the time limit to all processes of the job's steps.
    cluster.run("scancel", "--signal=USR1", job)
    assert cluster.wait(job, "PENDING")["Restarts"] == "1"
    stopped_after = steps_made(run / "steps.jsonl")
    assert stopped_after < STEPS
    assert (run / "checkpoints" / f"step-{stopped_after:06}").is_dir()

    assert cluster.wait(job, "COMPLETED")["Restarts"] == "1"
    assert log.read_text().count("ranks: 2 on cpu") == 2
    alone = tmp_path / "alone"
    arguments = [*CONFIG, *options, "--strategy=single", f"--run-dir={alone}"]
    run_ranks(train_alone, 1, arguments, initialize=False)
    assert losses(run / "steps.jsonl") == losses(alone / "steps.jsonl")
    assert len(losses(run / "steps.jsonl")) == STEPS


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (1, "FAILED"), (2, "FAILED")])
def test_other_exit_codes_are_not_requeued(
    code: int, state: str, cluster: Cluster, tmp_path: Path
) -> None:
    launcher = stub(tmp_path / "launcher", f"exit {code}")
    job = submit(cluster, tmp_path / "log", [], PYTHON=launcher)
    ended = cluster.wait(job, state)
    assert (ended["ExitCode"], ended["Restarts"]) == (f"{code}:0", "0")


def test_each_node_gets_one_launcher(cluster: Cluster, tmp_path: Path) -> None:
    show = 'printf "%s|" "$(hostname)" "$SLURM_GPUS_ON_NODE" "$@"'
    launcher, log = stub(tmp_path / "launcher", show), tmp_path / "log"
    words = "-m|distmp|launch|--|--resume=auto|--config|preset:quickstart"

    def output(*options: str) -> str:
        run = ["--data.path=a directory"]
        job = submit(cluster, log, run, options, PYTHON=launcher)
        cluster.wait(job, "COMPLETED")
        return log.read_text()

    unchanged = output()
    for name in NAMES:
        assert unchanged.count(f"{name}|8|{words}|--data.path=a directory|") == 1
    # Options of sbatch override those in the file.
    smaller = output("--nodes=1", "--gpus-per-node=4")
    assert smaller.removeprefix(unchanged).count(f"|4|{words}|") == 1


PROBE = """\
from distmp.distributed.rank_environment import adopt_ranks
from distmp.distributed.rank_environment import RankEnvironment
from distmp.errors import ConfigError
try:
    adopt_ranks()
    print(RankEnvironment.from_variables())
except ConfigError as error:
    print(error.setting)
"""


def test_slurm_tasks_read_their_rank_environment(cluster: Cluster, tmp_path: Path) -> None:
    """What `python -m distmp.train` would do, without importing torch eleven times."""
    # A test may train alone anywhere.
    probe = f"env -u PYTEST_CURRENT_TEST {sys.executable} {tmp_path / 'probe.py'}"
    (tmp_path / "probe.py").write_text(PROBE)
    script = stub(
        tmp_path / "script",
        f"{probe}\nsrun {probe}\n"
        "export MASTER_ADDR=node1 MASTER_PORT=29500 WORLD_SIZE=4\n"
        f"srun {probe}\n"
        f"WORLD_SIZE=1 srun {probe}\n",
    )
    log = tmp_path / "log"
    tasks = ["--nodes=2", "--ntasks-per-node=2", "--ntasks=4", "--overcommit"]
    variables = {"PYTHONPATH": str(ROOT)}
    job = cluster.run(
        "sbatch", "--parsable", f"--output={log}", *tasks, script, cwd=tmp_path, **variables
    ).strip()
    cluster.wait(job, "COMPLETED")
    batch, *lines = (line for line in log.read_text().splitlines() if "srun: " not in line)
    assert batch == "SLURM_NTASKS"
    assert lines[:4] == ["SLURM_STEP_NUM_TASKS"] * 4
    ranks = [RankEnvironment(rank, rank % 2, 4, 2) for rank in range(4)]
    assert sorted(lines[4:8]) == list(map(str, ranks))
    assert lines[8:] == [str(RankEnvironment())] * 4
    # A shell of salloc runs single processes.
    shell = cluster.run("salloc", "--quiet", *tasks, *probe.split(), cwd=tmp_path, **variables)
    assert shell.splitlines()[-1] == str(RankEnvironment())


@pytest.mark.nightly
@pytest.mark.parametrize("cause", ["time limit", "a node fails"])
def test_job_is_requeued_at_time_limit(cause: str, cluster: Cluster, tmp_path: Path) -> None:
    """Slurm checks time limits every 30 seconds, and sends the signal that the file requests."""
    launcher = stub(
        tmp_path / "launcher",
        "trap 'exit 75' USR1\n"
        'if [ "$SLURM_RESTART_COUNT" = 1 ]; then exit; fi\n'
        "for _ in $(seq 600); do sleep 0.1; done",
    )
    options = ("--time=2",) if cause == "time limit" else ()
    log = tmp_path / "log"
    job = submit(cluster, log, [], options, PYTHON=launcher)
    if cause == "a node fails":
        cluster.wait(job, "RUNNING")
        cluster.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
        cluster.run("scontrol", "update", "NodeName=node2", "State=RESUME")
    assert cluster.wait(job, "COMPLETED")["Restarts"] == "1"
    assert ("Exited with exit code 75" in log.read_text()) == bool(options)
