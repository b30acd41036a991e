from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from distmp.config import BatchConfig, RunConfig
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.world import leave
from distmp.errors import LOST_PEER_EXIT_CODE, SetupError
from distmp.launcher.preflight import comparison, speed
from distmp.launcher.preflight import store as meeting
from distmp.launcher.preflight.check import is_wanted, join_checked
from tests.ranks import run_ranks

LIMIT_SECONDS = 20.0
SHORT_SECONDS = 5.0


@contextlib.contextmanager
def store_of_an_agent() -> Iterator[int]:
    """Keep a store as torchrun's agent does; give its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield store.port
    del store


class Ending(NamedTuple):
    code: int
    told: str
    seconds: float


def as_rank(case: str, port: int, folder: str, limit: float) -> Ending:
    """Run a preflight in a child of this rank, which may end as it likes."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    told = Path(folder) / f"{case}-{os.environ['RANK']}"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        with told.open("wb", buffering=0) as file:
            os.dup2(file.fileno(), 2)
            os._exit(checked(CASES[case], limit))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return Ending(code, told.read_text(), time.monotonic() - started)


def checked(case: Callable[[int], RunConfig | None], limit: float) -> int:
    environment = RankEnvironment.from_variables()
    try:
        config = case(environment.rank) or RunConfig()
        _, report = join_checked(config, environment, limit)
        for line in (report.summary, *report.warnings):
            sys.stderr.write(f"{line}\n")
        leave()
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    finally:
        sys.stderr.flush()
    return 0


def well(rank: int) -> None:
    pass


def other_settings(rank: int) -> RunConfig | None:
    if rank == 2:
        comparison.versions = lambda: {"torch": "2.10.0", "python": "3.11"}  # type: ignore[assignment]
    else:
        comparison.versions = lambda: {"torch": "2.13.0", "python": "3.11"}  # type: ignore[assignment]
    os.environ["NCCL_ALGO"] = "Ring" if rank == 1 else "Tree"
    return RunConfig(batch=BatchConfig(microbatch_size=8)) if rank == 1 else None


def slow_ones(rank: int) -> None:
    """Rank 1 multiplies slowly, rank 2 has a slow link."""
    multiply, exchange = torch.mm, speed._exchange

    def multiply_slowly(*tensors: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return multiply(*tensors)

    def exchange_slowly(sent: torch.Tensor, partner: int) -> None:
        time.sleep(0.2)
        exchange(sent, partner)

    if rank == 1:
        torch.mm = multiply_slowly  # type: ignore[assignment]
    if rank == 2:
        speed._exchange = exchange_slowly


def never_comes(rank: int) -> None:
    if rank == 1:
        time.sleep(2 * SHORT_SECONDS)
        os._exit(77)


def hangs_in_the_middle(rank: int) -> None:
    if rank == 2:
        # It keeps the interpreter locked, so that its own threads stand still too.
        torch.mm = lambda *_: ctypes.PyDLL(None).sleep(3600)  # type: ignore[assignment]


CASES: dict[str, Callable[[int], RunConfig | None]] = {
    function.__name__: function  # type: ignore[attr-defined]
    for function in (
        well,
        other_settings,
        slow_ones,
        never_comes,
        hangs_in_the_middle,
    )
}


def endings(case: str, folder: Path, limit: float = LIMIT_SECONDS) -> list[Ending]:
    with store_of_an_agent() as port:
        found = run_ranks(as_rank, 3, case, port, str(folder), limit, initialize=False)
    # Whatever happens, there is an end.
    assert all(ending.seconds < 2.5 * limit for ending in found)
    return found


def test_ranks_that_are_well(tmp_path: Path) -> None:
    found = endings("well", tmp_path)
    assert {ending.code for ending in found} == {0}
    assert found[0].told.startswith("3 ranks on 1 host, alike; matrix product ")
    # All ranks know the same.
    assert len({ending.told.rpartition(";")[0] for ending in found}) == 1


def test_ranks_that_differ_are_named_with_the_setting(tmp_path: Path) -> None:
    found = endings("other_settings", tmp_path)
    assert {ending.code for ending in found} == {2}
    host = os.uname().nodename
    for ending in found:
        assert f'version of torch differs: "2.13.0" on ranks 0-1 ({host}), "2.10.0" on' in (
            ending.told
        )
        assert f"batch.microbatch_size differs: 16 on ranks 0, 2 ({host}), 8 on rank 1" in (
            ending.told
        )
        assert ending.told.count("differs") == 2  # nothing else does, Python least of all


def test_slow_ranks_are_named(tmp_path: Path) -> None:
    found = endings("slow_ones", tmp_path)
    assert {ending.code for ending in found} == {0}
    told = [line for line in found[0].told.splitlines() if " is slow: " in line]
    for rank, what in ((1, "a matrix product"), (2, "an exchange of data")):
        lines = [line for line in told if what in line]
        assert any(f"rank {rank} on {os.uname().nodename} is slow" in line for line in lines)
        # Other workers of this machine may slow down another rank too, but not as much.
        factors = {line.split()[1]: float(line.split(", ")[1].split()[0]) for line in lines}
        assert max(factors, key=factors.__getitem__) == str(rank)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("never_comes", f"no word from rank 1 on {os.uname().nodename} within 5 s"),
        ("hangs_in_the_middle", f"rank 2 on {os.uname().nodename} (pid "),
    ],
)
def test_a_rank_that_holds_up_the_others_is_named(case: str, message: str, tmp_path: Path) -> None:
    found = endings(case, tmp_path, SHORT_SECONDS)
    speakers = [ending for ending in found if message in ending.told]
    assert len(speakers) == 1
    assert speakers[0].code == 1
    assert {ending.code for ending in found} <= {1, LOST_PEER_EXIT_CODE, 77}
    assert ("is still to multiply matrices" in speakers[0].told) == (case != "never_comes")


def test_somebody_else_at_the_address_of_the_store(tmp_path: Path) -> None:
    """Who accepts connections and says nothing keeps torch's store waiting without end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        arguments = ("well", port, str(tmp_path), SHORT_SECONDS)
        found = run_ranks(as_rank, 2, *arguments, initialize=False)
    for rank, ending in enumerate(found):
        assert ending.code == 1
        assert f"rank {rank} on {os.uname().nodename} is still to reach the store at" in ending.told
        assert f":{port} after 5 s; see that" in ending.told


def test_a_store_out_of_reach_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with store_of_an_agent() as port:
        pass  # nobody listens there any more
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "STORE_SECONDS", 1.0)
    with pytest.raises(meeting.PreflightError, match=f"rank 1 on .* the store at .*:{port}"):
        join_checked(RunConfig(), RankEnvironment(1, 0, 2, 1))


@pytest.mark.parametrize(
    ("setting", "world_size", "local_world_size", "wanted"),
    [
        ("auto", 4, 2, True),
        ("auto", 4, 4, False),
        ("auto", 1, 1, False),
        ("always", 4, 4, True),
        ("always", 1, 1, False),
        ("never", 4, 2, False),
    ],
)
def test_when_it_runs(setting: str, world_size: int, local_world_size: int, wanted: bool) -> None:
    config = RunConfig(preflight=setting)  # type: ignore[arg-type]
    environment = RankEnvironment(0, 0, world_size, local_world_size)
    assert is_wanted(config, environment) == wanted
