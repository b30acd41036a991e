"""What runs record about ranks and machines: logs, manifest, and the preflight report."""

from __future__ import annotations

import math
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from distmp.config import load
from distmp.telemetry.records import read_records
from distmp.train import main
from distmp.training.run_directory import read_starts
from distmp.training.run_fingerprint import to_json
from tests.elastic import Job, run_jobs
from tests.torchrun import corpus, environment, tiny, torchrun

# Its second rank is slow, writes to the file descriptor as C++ does, and is killed in step 4.
KILLED = """
import os, signal, time, torch
from torch import nn
from distmp.training.callbacks.stragglers import StragglerDetection

StragglerDetection.every = 1

class Killed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(257, 257)
        self.calls = 0

    def forward(self, tokens):
        self.calls += torch.is_grad_enabled()  # not what the first step tries out
        if torch.distributed.get_rank() == 1:
            time.sleep(0.3)
            if self.calls == 4 * 2:  # there are two microbatches
                os.write(2, b"last words of rank 1\\n")
                os.kill(os.getpid(), signal.SIGKILL)
        return self.table(tokens)
"""


@pytest.mark.nightly
def test_killed_rank_has_complete_log(tmp_path: Path) -> None:
    directory = tmp_path / "0"
    directory.mkdir()
    (directory / "models.py").write_text(KILLED)
    arguments = [
        f"--data.path={corpus(tmp_path / 'corpus')}",
        "--model.name=models:Killed",
        "--data.sequence-length=32",
        "--precision.policy=fp32",
        "--run-dir=run",
        "--log.every=1",
        "--batch.global-batch-size=8",
        "--batch.microbatch-size=2",
        "--preflight=always",
    ]
    host = socket.gethostname()
    (done,) = run_jobs([Job(arguments)], tmp_path)
    assert done.exit_codes[1] == -signal.SIGKILL
    assert "preflight: 2 ranks on 1 host, consistent" in done.stdout
    # The output of the ranks is on the console and in their files.
    assert done.stderr.count("last words of rank 1") == 1
    first, second = (
        (directory / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)
    )
    for line in done.stdout.splitlines():
        assert line in first
    assert "step    3/1000" in first
    assert "rank 1 ended without a message" in first
    assert f": rank 1 of 2 on {host}, pid " in second.splitlines()[0]
    assert second.splitlines()[-1] == "last words of rank 1"
    # The first step has no step before it, and two in a row make a rank slow.
    records = read_records(directory / "run" / "steps.jsonl")
    times = [record.rank_seconds or [] for record in records]
    assert [len(seconds) for seconds in times] == [2, 2, 2]
    assert all(map(math.isnan, times[0]))
    assert all(slow > 0.6 > fast for fast, slow in times[1:])
    assert re.search(rf"rank 1 on {host} takes .* of the others .*, since step 2\n", done.stdout)
    (start,) = read_starts(directory / "run" / "manifest.json")
    assert [rank["host"] for rank in start["ranks"]] == [host, host]
    assert f"pid {start['ranks'][1]['pid']}" in second.splitlines()[0]


def test_resumed_run_appends_to_logs_and_manifest(cwd: Path) -> None:
    arguments = tiny(cwd, "--resume=auto", "--preflight=always")
    for steps in (2, 3):
        assert main([*arguments, f"--steps={steps}", "--log.console=off"]) == 0
    first, second = read_starts(cwd / "run" / "manifest.json")
    assert first["configuration"]["steps"] == 2
    configuration = to_json(load([*arguments, "--steps=3", "--log.console=off"]))
    assert second["configuration"] == configuration
    headers = (cwd / "run" / "logs" / "rank-0.log").read_text().splitlines()
    assert len([line for line in headers if ": rank 0 of 1 on " in line]) == 2


@pytest.mark.nightly
def test_machines_with_different_settings_do_not_start(tmp_path: Path) -> None:
    """Two agents of torchrun, as on two machines, with different values of one setting."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    jobs = []
    for steps in (20, 30):
        command = torchrun(*tiny(tmp_path, f"--steps={steps}"), ranks=1)
        command.remove("--standalone")
        where = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        where += [f"--rdzv-conf=is_host={int(steps == 20)}", "--local-addr=127.0.0.1"]
        command[3:3] = where
        jobs.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
            )
        )
    try:
        outputs = [job.communicate()[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    host = socket.gethostname()
    assert all(job.returncode != 0 for job in jobs)
    ours = [line for text in outputs for line in text.splitlines() if line.startswith("distmp: ")]
    pairs = [
        (f"{a} on rank 0 ({host})", f"{b} on rank 1 ({host})") for a, b in ((20, 30), (30, 20))
    ]
    assert ours in [[f"distmp: preflight: steps differs: {a}, {b}"] for a, b in pairs]
    assert not (tmp_path / "run").exists()
