"""A rank that does not come to a decision is named, with the line that it executes."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distmp import DistributedGradScaler, TrainingError
from distmp.scaling import roll_call
from tests.ranks import ranks

HERE = re.escape(__file__)


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
def test_error_names_the_rank_that_is_somewhere_else(steps: int, tmp_path: Path) -> None:
    join(tmp_path, timeout_seconds=3)
    work = Work()
    for _ in range(steps):
        work.step()
    if dist.get_rank() == 1:
        while len(list(tmp_path.glob("done-*"))) < 2:
            time.sleep(0.01)
        return
    last = r"; the last call of its scaler was update\(\) in iteration 2" if steps else ""
    message = (
        rf"^step\(\) in iteration {steps + 1} waited in vain: rank 1 is at {HERE}:\d+ in "
        rf"test_error_names_the_rank_that_is_somewhere_else \(`time.sleep\(0.01\)`\){last}; make "
    )
    with pytest.raises(TrainingError, match=message):
        work.step()
    (tmp_path / f"done-{dist.get_rank()}").touch()


@ranks(3, initialize=False)
def test_warning_comes_earlier(tmp_path: Path) -> None:
    roll_call.PATIENCE_SECONDS = 0.5
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
    # One rank of those that wait says it.
    messages = [record.getMessage() for record in records]
    assert len(messages) == (1 if me == 0 else 0)
    if me == 0:
        assert re.match(
            rf"rank 0 has waited for \d+ s in step\(\) in iteration 2: rank 2 is at {HERE}:\d+ in "
            r"doing_something_else \(`(while|time).*`\); the last call of its scaler was update\(\)"
            " in iteration 1$",
            messages[0],
        )
    assert work.parameter.tolist() == [-(2.0**-15)] * 2


def release(directory: Path, records: list[logging.LogRecord] | None) -> None:
    while records is not None and not records:
        time.sleep(0.01)
    if records is not None:
        time.sleep(3)  # nobody else warns
        (directory / "warned").touch()


def killed(directory: str) -> Any:
    join(Path(directory), timeout_seconds=60)
    work = Work()
    work.step()
    if dist.get_rank() == 2:
        if (pid := os.fork()) == 0:
            time.sleep(60)
        Path(directory, "pid").write_text(str(pid))
    return None
