from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from distmp.distributed import flight_recorder
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.rendezvous_store import TCPStore
from distmp.distributed.world import (
    World,
    join,
    leave,
    leave_after_error,
    local_device,
    world_of_process,
)
from distmp.errors import ConfigError, SetupError, TrainingError
from tests.marks import nightly
from tests.ports import reserved_port
from tests.ranks import ranks, run_ranks
from tests.torchrun import python, run

CPU = torch.device("cpu")


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_process_without_group_is_single(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    assert World.current() == World(0, 1, CPU, None)
    assert World.current("cpu").device == CPU


def test_current_cuda_device_is_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert World.current().device == torch.device("cuda", 3)
    assert World.current("cuda").device == torch.device("cuda", 3)
    assert World.current("cuda:1").device == torch.device("cuda", 1)
    assert World.current("cpu").device == CPU


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (1, 1), (2, 0), (5, 1)])
def test_ranks_share_available_gpus(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, index: int
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert local_device(local_rank) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]


class Group(NamedTuple):
    """How a process group was initialized."""

    backend: str
    device: torch.device | None


def started_with(gpu: str, model: str, start: Callable[[], object]) -> Group:
    """Start a rank whose process sees one GPU; NCCL itself needs a real one."""
    asked: list[Group] = []
    gloo = functools.partial(dist.init_process_group, "gloo")

    def initialize(backend: str, *, device_id: torch.device | None, **options: object) -> None:
        assert any(name in os.environ for name in flight_recorder.SIZE_VARIABLES)
        asked.append(Group(backend, device_id))
        gloo(**options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", os.environ["TEST_PORT"])
        for name, value in {"is_available": True, "device_count": 1, "current_device": 0}.items():
            patch.setattr(torch.cuda, name, lambda value=value: value)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        properties = SimpleNamespace(uuid=gpu, name=model)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(dist, "init_process_group", initialize)
        start()
    # Rank 0 hosts the store until the other has read it.
    dist.barrier()
    leave()
    (group,) = asked
    return group


def start_of_trainer() -> object:
    return join(RankEnvironment.from_variables(), timeout_seconds=20)


TRAINER, LOOP = start_of_trainer, world_of_process


@pytest.mark.parametrize(
    ("start", "gpus", "model", "backend"),
    [
        pytest.param(TRAINER, ["GPU-a", "GPU-b"], "H", "cpu:gloo,cuda:nccl", id="a GPU for each"),
        pytest.param(TRAINER, ["GPU-a", "GPU-a"], "H", "gloo", id="a GPU for both"),
        pytest.param(LOOP, ["MIG-a", "MIG-b"], "A MIG 1g.5gb", "gloo", id="slices of a GPU"),
    ],
)
def test_nccl_needs_one_gpu_per_rank(
    start: Callable[[], object], gpus: list[str], model: str, backend: str
) -> None:
    """`device_count` is 1 for each rank, as with `srun --gpus-per-task=1`."""
    groups = run_ranks(started_as_rank, 2, gpus, model, start, initialize=False)
    device = torch.device("cuda", 0) if "nccl" in backend else None
    assert groups == [Group(backend, device)] * 2


def started_as_rank(gpus: list[str], model: str, start: Callable[[], object]) -> Group:
    return started_with(gpus[int(os.environ["RANK"])], model, start)


def test_process_without_launcher_creates_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    monkeypatch.delenv("RANK", raising=False)
    assert join(RankEnvironment(), timeout_seconds=5) == World(0, 1, CPU, None)
    leave()
    assert not dist.is_initialized()


def test_cpu_of_accelerate_is_the_device_of_a_single_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert world_of_process().device == CPU
    assert world_of_process("cuda").device == torch.device("cuda", 0)


@ranks(2, initialize=False)
def test_ranks_create_and_destroy_group() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"])
    world = join(RankEnvironment.from_variables(), timeout_seconds=20)
    assert (world.rank, world.world_size) == (int(os.environ["RANK"]), 2)
    total = torch.tensor(world.rank + 1.0, device=world.device)
    dist.all_reduce(total, group=world.group)
    assert total == 3
    leave()
    assert not dist.is_initialized()


def initialize_again(port: int) -> float:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    total = torch.tensor(0.0)
    for _ in range(3):
        # The other rank arrives when it could have read the addresses of this one.
        time.sleep(0.2 * int(os.environ["RANK"]))
        join(RankEnvironment.from_variables(), timeout_seconds=20)
        total += 1
        dist.all_reduce(total)
        dist.destroy_process_group()
    return total.item()


def test_group_is_initialized_again_after_the_user_destroyed_it() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(initialize_again, 2, server.port, initialize=False) == [14.0] * 2


@pytest.mark.parametrize("port", ["x", "0", "65536"])
def test_invalid_port_is_named(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**launched, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    for start in (world_of_process, start_of_trainer):
        with pytest.raises(ConfigError, match="must be") as caught:
            start()
        assert (caught.value.setting, str(caught.value.value)) == ("MASTER_PORT", port)


@pytest.fixture(autouse=True)
def _port(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with reserved_port() as port:
        monkeypatch.setenv("TEST_PORT", str(port))
        yield


# A failure of one rank fails all ranks


def refuse(*ranks: int, message: str = "no") -> str:
    if dist.is_initialized() and dist.get_rank() not in ranks:
        return f"made by {dist.get_rank()}"
    raise ConfigError("data.path", "x", message)


@ranks(2)
def test_successful_work_returns_its_result() -> None:
    world = World.current("cpu")
    assert world.ranks.all_or_none(refuse) == f"made by {world.rank}"


@ranks(2)
def test_problem_of_one_rank_is_raised_on_all() -> None:
    with pytest.raises(SetupError) as caught:
        World.current("cpu").ranks.all_or_none(lambda: refuse(1))
    assert str(caught.value) == "data.path = 'x': no"
    assert caught.value.exit_code == ConfigError.exit_code == 2


@ranks(2)
def test_problems_of_several_ranks_are_listed_by_rank() -> None:
    rank = dist.get_rank()
    with pytest.raises(SetupError) as caught:
        World.current("cpu").ranks.all_or_none(lambda: refuse(0, 1, message=f"no {rank}"))
    assert str(caught.value) == "rank 0: data.path = 'x': no 0; rank 1: data.path = 'x': no 1"


def test_single_process_message_is_the_problem() -> None:
    def fail() -> None:
        raise TrainingError("cannot")

    with pytest.raises(SetupError, match=r"^cannot$") as caught:
        World.current("cpu").ranks.all_or_none(fail)
    assert caught.value.exit_code == 1


def test_other_exceptions_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        World.current("cpu").ranks.all_or_none(lambda: 1 // 0)


@ranks(2, initialize=False)
def test_mpirun_ranks_create_group() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        end = name.replace("WORLD_", "")
        os.environ[f"OMPI_COMM_WORLD_{end}"] = os.environ.pop(name)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"])
    world = world_of_process("cpu")
    assert (world.rank, world.world_size) == (int(os.environ["OMPI_COMM_WORLD_RANK"]), 2)
    assert world.backend == "gloo"
    dist.barrier()
    leave()


@pytest.mark.parametrize(("backend", "destroyed"), [("nccl", False), ("gloo", True)])
@ranks(1)
def test_group_of_nccl_is_not_destroyed_after_an_error(backend: str, destroyed: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distmp.distributed.world.backends", lambda _: {"cuda": backend})
        leave_after_error()
    assert dist.is_initialized() is not destroyed


SCRIPT = """
from distmp.distributed import world
world.world_of_process("cpu")
world.backends = lambda _: {"cuda": "nccl"}
world.leave = lambda: print("left")
"""


@pytest.mark.parametrize(("end", "output"), [nightly("", "left\n"), ("1 / 0", "")])
def test_script_that_fails_does_not_wait_for_kernels(tmp_path: Path, end: str, output: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + end)
    with reserved_port() as port:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        variables = {"RANK": "0", "LOCAL_RANK": "0", **dict.fromkeys(names, "1"), **address}
        done = run(python("script.py"), tmp_path, variables=variables)
    assert done.stdout == output, done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n") is bool(end), done.stderr


def test_forked_process_cannot_use_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="'cuda': this process was forked"):
        local_device(0)
