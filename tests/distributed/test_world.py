from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.world import World, join, leave, local_device
from distmp.errors import ConfigError, SetupError, TrainingError
from tests.ranks import ranks

CPU = torch.device("cpu")


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_process_without_a_group_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    assert World.current() == World(0, 1, CPU, None)
    assert World.current("cpu").device == CPU


def test_the_current_cuda_device_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert World.current().device == torch.device("cuda", 3)
    assert World.current("cuda").device == torch.device("cuda", 3)
    assert World.current("cuda:1").device == torch.device("cuda", 1)
    assert World.current("cpu").device == CPU


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (1, 1), (2, 0), (5, 1)])
def test_ranks_share_the_gpus_that_there_are(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, index: int
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert local_device(local_rank) == torch.device("cuda", index)
    assert chosen == [torch.device("cuda", index)]


@pytest.mark.parametrize(
    ("gpus", "local_world_size", "backend"),
    [(0, 2, "gloo"), (1, 2, "gloo"), (2, 2, "cpu:gloo,cuda:nccl"), (4, 2, "cpu:gloo,cuda:nccl")],
)
def test_nccl_needs_one_gpu_per_rank(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local_world_size: int, backend: str
) -> None:
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, *, timeout, device_id: calls.append((backend, device_id)),
    )
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_world_size))
    device = join(RankEnvironment(1, 1, 2, 2), timeout_seconds=5).device
    assert calls == [(backend, device if "nccl" in backend else None)]


def test_a_process_that_torchrun_did_not_start_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without_cuda(monkeypatch)
    monkeypatch.delenv("RANK", raising=False)
    assert join(RankEnvironment(), timeout_seconds=5) == World(0, 1, CPU, None)
    leave()
    assert not dist.is_initialized()


@ranks(2, initialize=False)
def test_ranks_meet_and_part() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"])
    world = join(RankEnvironment.from_variables(), timeout_seconds=20)
    assert (world.rank, world.world_size) == (int(os.environ["RANK"]), 2)
    total = torch.tensor(world.rank + 1.0, device=world.device)
    dist.all_reduce(total, group=world.group)
    assert total == 3
    leave()
    assert not dist.is_initialized()


@pytest.fixture(autouse=True)
def _port(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TEST_PORT", str(free.getsockname()[1]))


# A failure of one rank fails all ranks


def refuse(*ranks: int, message: str = "no") -> str:
    if dist.is_initialized() and dist.get_rank() not in ranks:
        return f"made by {dist.get_rank()}"
    raise ConfigError("data.path", "x", message)


@ranks(2)
def test_work_that_succeeds_everywhere_returns_its_result() -> None:
    world = World.current("cpu")
    assert world.ranks.all_or_none(refuse) == f"made by {world.rank}"


@ranks(2)
def test_a_problem_of_one_rank_is_raised_on_all() -> None:
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


def test_alone_the_message_is_the_problem() -> None:
    def fail() -> None:
        raise TrainingError("cannot")

    with pytest.raises(SetupError, match=r"^cannot$") as caught:
        World.current("cpu").ranks.all_or_none(fail)
    assert caught.value.exit_code == 1


def test_faults_that_are_not_ours_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        World.current("cpu").ranks.all_or_none(lambda: 1 // 0)
