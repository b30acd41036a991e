"""Limits of tests: idle processes hang, busy ones do not, whatever the time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import progress
from tests.ports import reserved_port
from tests.progress import Progress, wait_until

SLEEPS = "import time; time.sleep(100)"
SPINS = "while True: pass"
STARTS_ANOTHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPINS!r}])"


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", request.param], start_new_session=True) as started:
        yield started
        os.killpg(started.pid, 9)


def problem_of(
    process: subprocess.Popen[bytes], idle: float, processor: float, *, seconds: float = 60
) -> str | None:
    limit = Progress([process.pid], idle, processor)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if problem := limit.problem():
            return problem
        time.sleep(0.2)
    return None


@pytest.mark.parametrize("process", [SLEEPS], indirect=True)
def test_idle_process_hangs(process: subprocess.Popen[bytes]) -> None:
    assert problem_of(process, 1, 100) == "no progress for 1 s"


@pytest.mark.parametrize("process", [SPINS, STARTS_ANOTHER], indirect=True)
def test_busy_process_does_not_hang(process: subprocess.Popen[bytes]) -> None:
    assert problem_of(process, 1, 100, seconds=3) is None


@pytest.mark.parametrize("process", [SPINS], indirect=True)
def test_cpu_time_is_limited(process: subprocess.Popen[bytes]) -> None:
    assert problem_of(process, 100, 0.2) == "more than 0.2 s of processor time"


@pytest.mark.parametrize("process", [SPINS], indirect=True)
def test_fake_clock_of_test_does_not_count(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = Progress([process.pid], 100, 100)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1e6)
    assert limit.problem() is None


def test_waiting_ends_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(progress, "IDLE_SHARE", 2.0)
    with pytest.raises(pytest.fail.Exception, match=r"no progress for 0.5 s: nothing yet"):
        wait_until(lambda: False, lambda: "nothing yet")
    wait_until(lambda: True)


HANGING_TEST = """
import time
from tests import progress

progress.IDLE_SECONDS = 1.0
progress.INTERVAL_SECONDS = 0.2

def test_hangs():
    time.sleep(100)

def test_works():
    pass
"""


def test_hanging_test_fails_and_next_runs(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    (tmp_path / "conftest.py").write_text((root / "tests" / "conftest.py").read_text())
    (tmp_path / "test_hanging.py").write_text(HANGING_TEST)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert "limit of tests/progress.py: no progress for 1 s" in done.stdout
    assert "1 failed, 1 passed" in done.stdout
    assert "in test_hangs" in done.stdout


# A reserved port is free for the server that a test starts, and for nobody else.


@pytest.mark.parametrize("libuv", [True, False])
def test_torch_store_listens_on_reserved_port(libuv: bool) -> None:
    with reserved_port() as port:
        server = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=libuv
        )
        assert server.port == port
        server.set("key", "value")
        assert server.get("key") == b"value"


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_reserved_port_is_in_use(address: str) -> None:
    in_use = pytest.raises(OSError, match="Address already in use")
    with reserved_port() as port, socket.socket() as other, in_use:
        other.bind((address, port))
