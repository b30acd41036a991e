"""A rank that ends as its test specifies: `python -m tests.launcher.worker ENDING DIRECTORY`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

# Not imported from distmp, which imports torch: a worker has to start quickly.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOPPED_EXIT_CODE = 75
GRACE_SECONDS = 1.0
signals: list[int] = []


def main(ending: str, directory: Path) -> None:
    rank = os.environ["RANK"]
    if ending in ("obey", "fail late"):
        for number in STOP_SIGNALS:
            signal.signal(number, lambda received, _: signals.append(received))
    if ending in ("ignore", "give up"):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: record_signal(directory / f"{rank}.received", ending))
    if ending == "stop":
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
    # Renamed when complete, because tests read it as soon as it exists.
    with (directory / "starts").open("a") as starts:
        starts.write(f"{rank}\n")
    unfinished = directory / f"{rank}.part"
    unfinished.write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")
    unfinished.rename(directory / f"{rank}.rank")
    if ending == "succeed":
        return
    if ending == "listen":
        (directory / f"{rank}.listening").write_text(json.dumps(listening_addresses()))
        # The first of several attempts fails.
        attempts = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
        done, allowed = (int(os.environ[name]) for name in attempts)
        sys.exit(done < allowed)
    if (rank == "1" and ending != "stop") or ending in ("obey", "fail late"):
        # The launcher ends all ranks after the first failure, also those that are still starting.
        while len(list(directory.glob("*.rank"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.02)
        end(ending, directory / f"{rank}.stopped")
    time.sleep(60)


def listening_addresses() -> list[str]:
    """Return where this rank and its launcher listen, while the ranks are connected."""
    import psutil
    import torch
    import torch.distributed as dist

    from distmp.distributed.rank_environment import RankEnvironment
    from distmp.distributed.rank_monitor import current
    from distmp.distributed.world import join, leave

    world = join(RankEnvironment.from_variables(), timeout_seconds=60)
    current()
    dist.all_reduce(torch.ones(1))
    world.ranks.gather(None)
    processes = [psutil.Process(), psutil.Process().parent()]
    found = [
        entry.laddr.ip
        for process in processes
        for entry in process.net_connections("inet")
        if entry.status == psutil.CONN_LISTEN
    ]
    dist.barrier()
    leave()
    return found


def record_signal(path: Path, ending: str) -> None:
    with path.open("a") as received:
        received.write(".")
    if ending == "give up" and path.stat().st_size == 2:
        # As a rank that a second Ctrl-C interrupts, or one that loses such a rank.
        sys.exit(3 if path.name.startswith("1") else 1)


def end(ending: str, stopped: Path) -> None:
    if ending == "raise":
        raise RuntimeError("the worker's own error")
    if ending.isdigit():
        sys.exit(int(ending))
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending in ("obey", "fail late"):
        while not signals:
            time.sleep(0.02)
        time.sleep(GRACE_SECONDS)
        if ending == "fail late" and stopped.name.startswith("1"):
            time.sleep(3 * GRACE_SECONDS)
            sys.exit(4)
        stopped.write_text(" ".join(map(str, signals)))
        sys.exit(130 if signal.SIGINT in signals else STOPPED_EXIT_CODE)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
