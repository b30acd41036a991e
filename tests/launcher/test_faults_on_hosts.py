"""Runs on two hosts that are killed or cut off end with the weights of undisturbed ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from distmp.distributed.limits import LINK_SECONDS
from tests.launcher.two_hosts import NAMES
from tests.soak.cluster import CHECKPOINT_EVERY, Cluster, check_result, cluster, undisturbed

pytestmark = pytest.mark.nightly

STEPS = 300
SETTINGS = [f"--steps={STEPS}"]
CUT_SECONDS = 30


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> object:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "alone", 2, SETTINGS)


def started(run: Cluster) -> None:
    """Start a run and wait for checkpoints."""
    run.start()
    run.wait_for(lambda: run.step() > 2 * CHECKPOINT_EVERY)


def test_ranks_and_a_host_are_killed(tmp_path: Path, expected: object) -> None:
    """Agents count restarts differently: only that of the second host sees its rank fail."""
    with cluster(2, tmp_path / "run", ["--max-restarts=3"], SETTINGS) as run:
        started(run)
        run.kill(1, "rank")
        run.wait_for(lambda: "restart 1 of 3" in run.text(0))
        run.kill(1, "host")
        run.restart(1)
        run.wait_for(lambda: not run.running())
        assert [agent.process.returncode for agent in run.agents] == [0, 0], run.report()
        assert "restart 2 of 3" in run.text(0), run.report()
        assert [path.name for path in run.runs()] == ["run"]
        check_result(run, expected, STEPS)


def test_the_first_host_is_killed(tmp_path: Path, expected: object) -> None:
    """Its store is gone, so the other host ends, and a scheduler starts both again."""
    options = ["--max-restarts=3"]
    with cluster(2, tmp_path / "run", options, [*SETTINGS, "--resume=auto"]) as run:
        started(run)
        run.kill(0, "host")
        run.wait_for(lambda: not run.running())
        assert run.agents[1].process.returncode not in (None, 0)
        ending = run.text(1).strip().splitlines()[-1]
        assert f"the first machine ({NAMES[0]}, 10.99.7.1)" in ending, run.report()
        run.start()
        run.wait_for(lambda: not run.running())
        assert [agent.process.returncode for agent in run.agents] == [0, 0], run.report()
        check_result(run, expected, STEPS)


def test_a_cut_connection(tmp_path: Path, expected: object) -> None:
    """Training continues without a restart after a cut shorter than `LINK_SECONDS`."""
    assert 2 * CUT_SECONDS <= LINK_SECONDS
    with cluster(2, tmp_path / "run", [], SETTINGS) as run:
        started(run)
        run.cut(1)
        time.sleep(CUT_SECONDS)
        run.reconnect(1)
        run.wait_for(lambda: not run.running())
        assert [agent.process.returncode for agent in run.agents] == [0, 0], run.report()
        assert "restart" not in run.text(0)
        check_result(run, expected, STEPS)


def test_a_host_leaves_and_comes_back(tmp_path: Path) -> None:
    """With `--nnodes 1:2` the other one trains alone meanwhile."""
    # So many that the other one does not finish alone.
    last_step = 10 * STEPS
    settings = [f"--steps={last_step}", "--reproducible", "--batch.global-batch-size=8"]
    expected = undisturbed(tmp_path / "alone", 2, settings)
    options = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-conf=last_call_timeout=4"]
    with cluster(2, tmp_path / "run", options, settings) as run:
        started(run)
        run.kill(1, "host")
        run.wait_for(lambda: "changed: number of ranks: 2 -> 1" in run.text(0))
        run.restart(1)
        run.wait_for(lambda: not run.running())
        assert [agent.process.returncode for agent in run.agents] == [0, 0], run.report()
        assert "restart 2 of 3: more machines have joined; continuing from" in run.text(0)
        check_result(run, expected, last_step)
