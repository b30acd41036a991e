"""Errors and warnings name the rank that is missing in a decision, with the line it executes."""

from __future__ import annotations

import functools
import gc
import logging
import os
import platform
import re
import subprocess
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distmp import DistributedGradScaler, TrainingError
from distmp.distributed import rank_monitor
from distmp.distributed.rank_monitor import RankMonitor
from tests import elastic
from tests.elastic import Job, run_jobs
from tests.ports import reserved_port
from tests.ranks import ranks, run_ranks
from tests.reference import make_engine, microbatches
from tests.torchrun import python, run

HERE = re.escape(__file__)
MISSING = "failed because ranks are missing:"


def join(directory: Path, timeout_seconds: float) -> None:
    """Set up a process group with a short timeout."""
    world_size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(directory / "store"), world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )


class Work:
    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.scaler = DistributedGradScaler("cpu")

    def step(self) -> None:
        self.parameter.grad = torch.ones(2)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def doing_something_else(done: Path) -> None:
    while not done.exists():
        time.sleep(0.01)


@pytest.mark.parametrize("steps", [0, 2])
@ranks(3, initialize=False)
def test_error_names_rank_at_other_call(steps: int, tmp_path: Path) -> None:
    join(tmp_path, timeout_seconds=3)
    work = Work()
    for _ in range(steps):
        work.step()
    if dist.get_rank() == 1:
        # The others find this rank in `sleep`, not in the condition, because it sleeps for long.
        while len(list(tmp_path.glob("done-*"))) < 2:
            time.sleep(0.5)
        return
    last = r"; the last call of its scaler was update\(\) in iteration 2" if steps else ""
    message = (
        rf"^step\(\) in iteration {steps + 1} {MISSING} rank 1 is at {HERE}:\d+ in "
        rf"test_error_names_rank_at_other_call \(`time.sleep\(0.5\)`\){last}; make "
    )
    with pytest.raises(TrainingError, match=message):
        work.step()
    (tmp_path / f"done-{dist.get_rank()}").touch()


@ranks(3, initialize=False)
def test_warning_precedes_error(tmp_path: Path) -> None:
    rank_monitor.PATIENCE_SECONDS = 0.5
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("distmp").addHandler(handler)
    join(tmp_path, timeout_seconds=60)
    work, me = Work(), dist.get_rank()
    work.step()
    if me == 2:
        doing_something_else(tmp_path / "warned")
        work.step()
        return
    watcher = threading.Thread(target=release, args=(tmp_path, records if me == 0 else None))
    watcher.start()
    work.step()
    watcher.join()
    # Only one of the waiting ranks logs the warning.
    messages = [record.getMessage() for record in records]
    assert len(messages) == (1 if me == 0 else 0)
    if me == 0:
        assert re.match(
            r"rank 0 has waited for \d+ s in step\(\) in iteration 2 for other ranks: rank 2 is at "
            rf"{HERE}:\d+ in "
            r"doing_something_else \(`(while|time).*`\); the last call of its scaler was update\(\)"
            " in iteration 1$",
            messages[0],
        )
    assert work.parameter.tolist() == [-(2.0**-15)] * 2


HOST = "import sys, time, torch.distributed as dist\n" + (
    "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), 2, True, wait_for_workers=False)\n"
    "time.sleep(60)"
)


def test_host_that_ends_while_a_rank_connects_to_its_store_does_not_delay_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with reserved_port() as port:
        host = subprocess.Popen(python("-c", HOST, str(port)))
        timeout = timedelta(seconds=30)
        store = dist.TCPStore("127.0.0.1", port, 2, False, timeout)  # type: ignore[attr-defined]

    class Ending:
        def check(self, keys: object) -> None:
            host.kill()
            host.wait()

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Ending)
    monkeypatch.setattr(rank_monitor, "CONNECT_SECONDS", 0.5)
    begin = time.monotonic()
    assert rank_monitor.open_store("test") is None
    assert time.monotonic() - begin < 20
    assert store.timeout == timeout


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@ranks(2, initialize=False)
def test_rank_that_leaves_the_loop_of_an_engine_is_named(strategy: str, tmp_path: Path) -> None:
    rank_monitor.PATIENCE_SECONDS = 0.5
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("distmp").addHandler(handler)
    join(tmp_path, timeout_seconds=4)
    engine = make_engine(strategy=strategy)
    batches = microbatches(0, [[2], [2]], dist.get_rank())
    engine.step(batches)
    if dist.get_rank() == 1:
        doing_something_else(tmp_path / "done")
        return
    late = rf"rank 1 is at {HERE}:\d+ in doing_something_else .*; the last call of its engine was "
    with pytest.raises(TrainingError, match=rf"^rank 0 has waited in engine\.step\(\) .*{late}"):
        engine.step(batches)
    (tmp_path / "done").touch()
    (warning,) = [record.getMessage() for record in records]
    assert re.match(rf"rank 0 has waited for \d+ s in engine\.step\(\) .*{late}", warning)


def release(directory: Path, records: list[logging.LogRecord] | None) -> None:
    while records is not None and not records:
        time.sleep(0.01)
    if records is not None:
        time.sleep(3)  # no other rank warns
        (directory / "warned").touch()


SCRIPT = """
import logging, os, signal, sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distmp import DistributedGradScaler
from distmp.distributed import rank_monitor

logging.basicConfig()
rank_monitor.PATIENCE_SECONDS = 1
dist.init_process_group("gloo", timeout=timedelta(seconds=int(sys.argv[2])))
model = DistributedDataParallel(torch.nn.Linear(50, 50))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = DistributedGradScaler("cpu", init_scale=4.0)


def train(leaves_out):
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 50)).sum()).backward()
        if step == 2 and dist.get_rank() == 1:
            if leaves_out == "everything":
                return
            if leaves_out == "step":
                continue
            if leaves_out == "its process":
                os.kill(os.getpid(), signal.SIGKILL)
        scaler.step(optimizer)
        scaler.update()


train(sys.argv[1])
"""


def trained(leaves_out: str, timeout_seconds: int, directory: Path) -> str:
    """Run the script on two ranks that do not end by themselves; return what it prints."""
    script = directory / "train.py"
    script.write_text(SCRIPT)
    job = Job([str(script), leaves_out, str(timeout_seconds)], entry="tests.elastic:script")
    (done,) = run_jobs([job], directory)
    return done.stderr


def trained_and_ended(leaves_out: str, directory: Path) -> str:
    """Run the script with torchrun on two ranks, whose interpreters end; return what it prints."""
    (directory / "train.py").write_text(SCRIPT)
    torchrun = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return run([*torchrun, "train.py", leaves_out, "60"], directory).stderr


@pytest.mark.nightly
def test_training_that_ends_cleanly_prints_nothing(tmp_path: Path) -> None:
    output = trained_and_ended("nothing", tmp_path)
    assert "Error" not in output
    assert "WARNING" not in output
    assert "store" not in output.lower()


@pytest.mark.nightly
def test_ended_rank_is_named(tmp_path: Path) -> None:
    output = trained_and_ended("everything", tmp_path)
    assert (
        f"TrainingError: step() in iteration 3 {MISSING} rank 1 on {platform.node()} does not "
        "answer: its process has ended or is stopped"
    ) in output


def test_rank_that_omits_step_is_named(tmp_path: Path) -> None:
    """The rank is in its next backward, where it waits for the ranks that wait in `step`."""
    output = trained("step", 8, tmp_path)
    line = (
        rf"rank 1 is at {re.escape(str(tmp_path))}/train.py:\d+ in train \(`scaler.scale\(.*"
        r"\.backward\(\)`\); the last call of its scaler was update\(\) in iteration 2"
    )
    warning = (
        r"WARNING:distmp:rank 0 has waited for \d+ s in step\(\) in iteration 3 for other ranks"
    )
    assert re.search(f"{warning}: {line}\n", output), output
    assert "gloo::EnforceNotMet" not in output


def _killed(directory: Path, port: int) -> str:
    """Run the script in a child of this rank, since rank 1 is killed; return what it prints."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    output = directory / f"stderr-{os.environ['RANK']}"
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
            elastic.script([str(directory / "train.py"), "its process", "60"])
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    return output.read_text()


def test_killed_rank_is_named(tmp_path: Path) -> None:
    """Without torchrun, which would end the other ranks immediately."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with reserved_port() as port:
        output, _ = run_ranks(_killed, 2, tmp_path, port, initialize=False)
    assert (
        f"TrainingError: step() in iteration 3 {MISSING} rank 1 on {platform.node()} does not "
        "answer: its process has ended or is stopped, or it has no scaler or engine yet; make the "
        "same calls of the scaler"
    ) in output


def _join(directory: Path) -> int:
    """Initialize the process group with a store of rank 0; return this rank."""
    rank, port = int(os.environ["RANK"]), directory / "port"
    if rank == 0:
        directory.mkdir()
        store = dist.TCPStore("localhost", 0, 2, True, wait_for_workers=False)
        (directory / "new").write_text(str(store.port))
        (directory / "new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(port.read_text()), 2, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return rank


@ranks(2, initialize=False)
def test_rank_monitors_of_a_new_group_meet_although_one_rank_had_one_before(tmp_path: Path) -> None:
    if _join(tmp_path / "first") == 0:
        assert rank_monitor.current() is not None
    dist.barrier()
    dist.destroy_process_group()
    _join(tmp_path / "second")
    monitor = rank_monitor.current()
    assert monitor is not None
    error = TrainingError("they do not meet")
    monitor.meet("the new group", lambda statuses: error, patience_seconds=5)


@ranks(2, initialize=False)
def test_rank_monitor_works_with_store_of_rank_0(tmp_path: Path) -> None:
    rank = _join(tmp_path / "store")
    work = Work()
    work.step()
    clip = functools.partial(work.scaler.clip_grad_norm_, work.optimizer, 1.0)
    call = clip if rank == 1 else work.step
    with pytest.raises(TrainingError, match=r"rank 1 calls clip_grad_norm_\(optimizer 0, 1.0\) in"):
        call()


def test_connection_to_store_of_ended_rank_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=20)
    client = dist.TCPStore("127.0.0.1", server.port, timeout=timeout, wait_for_workers=False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: client)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert rank_monitor.open_store("test") is not None
    del server
    gc.collect()
    began = time.monotonic()
    assert rank_monitor.open_store("test") is None
    assert time.monotonic() - began < 10


def test_ranks_answer_after_one_ended_while_it_asked() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    asking, answering = (RankMonitor(store, rank, world_size=3) for rank in (0, 1))
    answering._interval = 0.01
    store.add("questions", 1)  # the last action of rank 2
    answering.start()
    assert asking.query([1])[1] is not None
    answering.stop()


@ranks(2)
def test_thread_ends_with_the_process_group() -> None:
    assert "rank monitor" not in {thread.name for thread in threading.enumerate()}
    work = Work()
    work.step()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "rank monitor"]
    assert thread.daemon
    monitor = rank_monitor.current()
    assert monitor is not None
    freed = weakref.ref(monitor)
    dist.barrier()
    dist.destroy_process_group()
    thread.join(10)
    assert not thread.is_alive()
    del monitor, thread, work
    gc.collect()
    assert freed() is None


def test_single_process_starts_no_thread() -> None:
    scaler, parameter = DistributedGradScaler("cpu"), nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD([parameter]))
    assert "rank monitor" not in {thread.name for thread in threading.enumerate()}
