"""Runs on two simulated hosts, which may be killed, cut off or odd; see `two_hosts`."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from distmp.distributed.limits import LINK_SECONDS
from tests.launcher.two_hosts import NAMES, Agent, TwoHosts, two_hosts
from tests.progress import wait_until
from tests.soak.cluster import CHECKPOINT_EVERY, Cluster, check_result, cluster, undisturbed
from tests.torchrun import TINY, corpus, environment

pytestmark = pytest.mark.nightly

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
LATE_SECONDS = 20
FIRST_POD = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": "one",
    "PET_MASTER_PORT": "29403",
}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


def rendezvous_at(endpoint: str, *more: str) -> list[str]:
    return ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint}", *more]


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


def steps(directory: Path) -> list[int]:
    """Return the steps in the records of the only run."""
    lines = [line for file in directory.glob("run*/steps.jsonl") for line in file.open()]
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def wait_for_steps(directory: Path, number: int, agent: Agent) -> None:
    def is_over() -> bool:
        return agent.process.poll() is not None

    wait_until(lambda: is_over() or max(steps(directory), default=0) >= number, agent.text)
    assert not is_over(), agent.text()


def test_quickstart_runs_with_late_first_host(hosts: TwoHosts, tmp_path: Path) -> None:
    words = [
        *rendezvous_at("one:29400"),
        *("--", "--config", str(QUICKSTART), "--data.path", str(corpus(tmp_path / "data"))),
        *("--run-dir", str(tmp_path / "run"), "--steps=2", "--schedule.warmup-steps=1"),
        "--validation.final-samples=2",
    ]
    second = hosts.launch(1, *words)
    second.wait_for("waiting for the first machine (one, 10.99.7.1) to open port 29400")
    time.sleep(max(0.0, LATE_SECONDS - 10))
    first = hosts.launch(0, *words)
    (first_code, first_output), (second_code, second_output) = first.finish(), second.finish()
    assert first_code == 0, first_output
    assert second_code == 0, second_output
    assert "ranks: 2 on cpu" in first_output + second_output
    assert steps(tmp_path) == [1, 2]
    # Each host uses its own interface, and torchrun logs no warning or error.
    for output, link in zip((first_output, second_output), hosts.links, strict=True):
        assert f"GLOO_SOCKET_IFNAME={link} " in output
        assert not re.search(r"Traceback|^\[?[WE]\d{4}", output, flags=re.MULTILINE), output


def test_machines_numbered_by_variables_train(hosts: TwoHosts, tmp_path: Path) -> None:
    """As PyTorchJob, Volcano, Azure ML and scripts number machines with one process each."""
    words = [
        *("--nproc-per-node=1", "--", *TINY, "--data.path", str(corpus(tmp_path / "data"))),
        *("--run-dir", str(tmp_path / "run"), "--steps=2", "--schedule.warmup-steps=1"),
    ]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "one", "MASTER_PORT": "23456"}
    agents = [hosts.launch(host, *words, **world, RANK=str(host)) for host in range(2)]
    results = [agent.finish() for agent in agents]
    assert [code for code, _ in results] == [0, 0], results
    assert "ranks: 2 on cpu (gloo)" in "".join(output for _, output in results)
    assert steps(tmp_path) == [1, 2]


# A module sitecustomize, which Python imports at its start.
CLOCK = """
import ctypes, datetime, gc
usual = datetime.datetime.now
def now(tz=None):
    return usual(tz) + datetime.timedelta(seconds={seconds})
gc.get_referents(datetime.datetime.__dict__)[0]["now"] = staticmethod(now)
ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
"""


@pytest.mark.parametrize("seconds", [-60, 60])
def test_hosts_with_different_clocks_train_together(
    seconds: int, hosts: TwoHosts, tmp_path: Path
) -> None:
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK.format(seconds=seconds))
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path / "clock")])
    words = [
        *rendezvous_at("one:29400", "--rdzv-conf", "join_timeout=60"),
        *("--", *TINY, "--data.path", str(corpus(tmp_path / "data"))),
        *("--run-dir", str(tmp_path / "run"), "--steps=2", "--schedule.warmup-steps=1"),
    ]
    agents = [hosts.launch(0, *words), hosts.launch(1, *words, PYTHONPATH=path)]
    results = [agent.finish() for agent in agents]
    assert [code for code, _ in results] == [0, 0], results
    assert "ranks: 2 on cpu (gloo)" in "".join(output for _, output in results)
    assert "waiting for" not in results[0][1]


def test_disconnected_hosts_end_and_name_each_other(hosts: TwoHosts, tmp_path: Path) -> None:
    """Each host ends within its timeout and names the other one."""
    words = [
        *rendezvous_at("one:29400", "--rdzv-conf", "read_timeout=20"),
        *("--", *TINY, "--data.path", str(corpus(tmp_path / "data"))),
        *("--run-dir", str(tmp_path / "run"), "--steps=100000", "--timeout-minutes=0.25"),
    ]
    agents = [hosts.launch(host, *words) for host in range(2)]
    wait_for_steps(tmp_path, 3, agents[0])
    assert [hosts.listening(host) for host in range(2)] == [{"10.99.7.1"}, {"10.99.7.2"}]
    hosts.cut()
    (first_code, first_output), (second_code, second_output) = (a.finish() for a in agents)
    assert first_code != 0
    assert second_code != 0
    assert "lost two (10.99.7.2)" in last_line(first_output)
    assert "first machine (one, 10.99.7.1)" in last_line(second_output)


def test_failed_launches_are_one_message(hosts: TwoHosts) -> None:
    """All are started at once: each costs an import of torch, and waits for others or timeouts."""
    held = "import socket, time; s = socket.create_server(('', 29500)); time.sleep(600)"
    hosts.hold(0, sys.executable, "-c", held)
    patience = ("--rdzv-conf", "join_timeout=12")
    started = {
        # name: (host, options, variables), (exit code, pattern of the message)
        "never coming": (
            (0, rendezvous_at("one:29401", *patience), {}),
            (1, r"only 1 of 2 hosts joined 10\.99\.7\.1:29401 within 12 s: one \(10\.99\.7\.1\)"),
        ),
        "a pod of Kubeflow Trainer is missing": (
            (0, ["--rdzv-conf", "join_timeout=25"], {**FIRST_POD, "PET_NPROC_PER_NODE": "1"}),
            (1, r"only 1 of 2 hosts joined .*:29403 within 25 s: .*; missing: node rank 1\. Check"),
        ),
        "port in use": (
            (0, rendezvous_at("one:29500", *patience), {}),
            (1, "port 29500 of this machine is in use; end the process that listens"),
        ),
        "wrong port": (
            (1, rendezvous_at("one:29402", *patience), {}),
            (
                1,
                r"first machine \(one, 10\.99\.7\.1\) was not reached at .*:29402 .*"
                "nothing listens",
            ),
        ),
        "wrong address": (
            (1, rendezvous_at("10.99.7.77:29400", *patience), {}),
            (1, r"first machine \(10\.99\.7\.77\) was not .*does not respond to 10\.99\.7\.2"),
        ),
        "wrong name": (
            (1, rendezvous_at("three:29400"), {}),
            (
                1,
                r"the first machine of the run cannot be found: "
                "the name 'three' has no address here",
            ),
        ),
        "wrong interface": (
            (1, rendezvous_at("one:29400"), {"GLOO_SOCKET_IFNAME": "lo"}),
            (2, rf"GLOO_SOCKET_IFNAME = 'lo': .*use one of: .*{hosts.links[1]} \(10\.99\.7\.2"),
        ),
    }
    agents = {
        name: hosts.launch(host, *words, "--", "--steps=2", **variables)
        for name, ((host, words, variables), _) in started.items()
    }
    for name, (_, (expected, message)) in started.items():
        code, output = agents[name].finish()
        assert code == expected, f"{name}: {output}"
        assert re.search(message, last_line(output)), f"{name}: {output}"
        assert "Traceback" not in output, f"{name}: {output}"
        if "missing" in name:
            assert "waiting for node rank 1 (joined: one (10.99.7.1)), up to 25 s" in output


def test_different_configurations_are_refused(hosts: TwoHosts, tmp_path: Path) -> None:
    data = corpus(tmp_path / "data")
    words = [*rendezvous_at("one:29400"), "--", *TINY, f"--data.path={data}"]
    agents = [
        hosts.launch(host, *words, f"--optim.lr=1e-{3 + host}", "--steps=2") for host in range(2)
    ]
    (first_code, first_output), (second_code, second_output) = (a.finish() for a in agents)
    together = first_output + second_output
    assert [first_code, second_code] == [2, 2], together
    assert "failed with exit code 2" in last_line(second_output), together
    assert re.search(r"optim\.lr.*0\.001.*0\.0001", together), together
    assert "Traceback" not in together
    assert not (tmp_path / "runs").exists()


def test_hosts_with_different_files_are_refused(hosts: TwoHosts, tmp_path: Path) -> None:
    """The second host has other text of equal size, another loss, and its own run directory."""
    data, runs, own = corpus(tmp_path / "data"), tmp_path / "runs", tmp_path / "own"
    (tmp_path / "losses.py").write_text("from distmp.models.loss import next_token_loss as mine\n")
    runs.mkdir()
    (own / "runs").mkdir(parents=True)
    shutil.copytree(data, own / "data")
    text = (own / "data" / "text3.py").read_text()
    (own / "data" / "text3.py").write_text(text.replace("first", "third", 1))
    (own / "losses.py").write_text("from distmp.models.loss import next_token_loss as mine  #\n")
    words = [
        *rendezvous_at("one:29400"),
        "--",
        *TINY,
        f"--data.path={data}",
        "--model.loss=losses:mine",
    ]
    words += [f"--run-dir={runs}/run", "--steps=2"]
    different = "; ".join(
        f"mount --bind {own / name} {tmp_path / name}" for name in ("data", "runs", "losses.py")
    )
    first, second = hosts.launch(0, *words), hosts.launch(1, *words, mounts=different)
    (first_code, first_output), (second_code, second_output) = first.finish(), second.finish()
    together = first_output + second_output
    assert [first_code, second_code] == [2, 2], together
    (message,) = re.findall(r"preflight: (.*)", together)
    assert "see its messages above, or those of rank 0 on the first machine" in second_output
    assert re.search(
        r"files of the code differ: losses\.py differs: \d+ bytes \w+ on rank 0 \(one\), \d+ bytes "
        r"\w+ on rank 1 \(two\)",
        message,
    )
    assert f"{data}/text3.py differs: 2,000 bytes " in message
    assert "text2.py" not in message
    assert (
        f"run_dir = '{runs}/run' is not the same directory on all machines: rank 1 (two)" in message
    )
    assert "checkpoint.path" in message
    # Nothing is left behind.
    assert [*runs.iterdir(), *(own / "runs").iterdir()] == []


# Runs on hosts that are killed or cut off end with the weights of undisturbed ones.


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


def wait_for_success(run: Cluster) -> None:
    run.wait_for(lambda: not run.running())
    assert [agent.process.returncode for agent in run.agents] == [0, 0], run.report()


def test_run_recovers_from_killed_ranks_and_host(tmp_path: Path, expected: object) -> None:
    """Agents count restarts differently: only that of the second host sees its rank fail."""
    with cluster(2, tmp_path / "run", ["--max-restarts=3"], SETTINGS) as run:
        started(run)
        run.kill(1, "rank")
        run.wait_for(lambda: "restart 1 of 3" in run.text(0))
        run.kill(1, "host")
        run.restart(1)
        wait_for_success(run)
        assert "restart 2 of 3" in run.text(0), run.report()
        assert [path.name for path in run.runs()] == ["run"]
        check_result(run, expected, STEPS)


def test_run_recovers_from_killed_first_host(tmp_path: Path, expected: object) -> None:
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
        wait_for_success(run)
        check_result(run, expected, STEPS)


def test_short_connection_loss_needs_no_restart(tmp_path: Path, expected: object) -> None:
    """Training continues without a restart after a cut shorter than `LINK_SECONDS`."""
    assert 2 * CUT_SECONDS <= LINK_SECONDS
    with cluster(2, tmp_path / "run", [], SETTINGS) as run:
        started(run)
        run.cut(1)
        time.sleep(CUT_SECONDS)
        run.reconnect(1)
        wait_for_success(run)
        assert "restart" not in run.text(0)
        check_result(run, expected, STEPS)


def test_run_continues_while_host_is_away(tmp_path: Path) -> None:
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
        wait_for_success(run)
        assert "restart 2 of 3: more machines have joined; continuing from" in run.text(0)
        check_result(run, expected, last_step)
