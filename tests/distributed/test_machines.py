from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from distmp.commands.explain.fake_ranks import simulate_ranks
from distmp.distributed import collectives
from distmp.distributed.collectives import exchange_groups
from distmp.distributed.world import World
from distmp.parallel.fsdp_setup import device_mesh
from tests.machines import pretend
from tests.ranks import ranks

CPU = torch.device("cpu")


def members(world_size: int, *, local: int, copies: int = 1) -> list[list[int]]:
    """Return the ranks of the groups of rank 0."""
    with simulate_ranks(world_size):
        group = dist.group.WORLD
        if copies > 1:
            group = dist.new_group(list(range(world_size // copies)))
        assert group is not None
        pretend(local)
        groups = exchange_groups(group, CPU, copies=copies)
        assert exchange_groups(group, CPU, copies=copies) == groups
        return [dist.get_process_group_ranks(each) for each in groups]


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")


def test_equal_machines_divide_ranks_into_groups() -> None:
    assert members(16, local=4) == [[0, 1, 2, 3], [0, 4, 8, 12]]
    assert members(1024, local=8) == [[*range(8)], [*range(0, 1024, 8)]]


def test_replicas_on_several_machines_divide_into_groups() -> None:
    assert members(16, local=2, copies=2) == [[0, 1], [0, 2, 4, 6]]
    assert members(16, local=4, copies=4) == [[0, 1, 2, 3]]
    assert members(16, local=8, copies=4) == [[0, 1, 2, 3]]


def test_single_machine_and_rank_per_machine_are_undivided() -> None:
    assert members(4, local=4) == [[0, 1, 2, 3]]
    assert members(4, local=1) == [[0, 1, 2, 3]]


def test_machines_of_unequal_size_form_one_group() -> None:
    assert members(6, local=4) == [[0, 1, 2, 3, 4, 5]]
    assert members(10, local=4) == [[*range(10)]]


@ranks(4)
def test_decision_is_equal_on_all_ranks() -> None:
    pretend(2, local_rank=dist.get_rank() // 2)  # numbered round-robin over the machines
    assert_undivided()
    pretend(1 if dist.get_rank() == 3 else 3)
    assert_undivided()
    pretend(4 if dist.get_rank() == 3 else 2)  # as if a variable was not set on one machine
    assert_undivided()
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        assert exchange_groups(pair, CPU) == (pair,)  # a group that others do not know of
    pretend(2)
    assert dist.group.WORLD is not None
    groups = exchange_groups(dist.group.WORLD, CPU)
    assert exchange_groups(dist.group.WORLD, CPU) == groups
    own = dist.get_rank()
    found = [dist.get_process_group_ranks(group) for group in groups]
    assert found == [[own // 2 * 2, own // 2 * 2 + 1], [own % 2, own % 2 + 2]]


@ranks(4)
def test_all_groups_have_the_timeout_of_the_default_group() -> None:
    pretend(2)
    default = dist.group.WORLD
    assert default is not None
    mesh = device_mesh(World.current(CPU), 2, "hsdp")
    groups = default, *exchange_groups(default, CPU), *mesh.get_all_groups()
    assert len({group._get_backend(CPU).options._timeout for group in groups}) == 1


def assert_undivided() -> None:
    group = dist.new_group(range(4))  # the answer for a group is found once
    assert exchange_groups(group, CPU) == (group,)


def test_ranks_are_compared_once_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    original = collectives._ranks_per_machine

    def counted() -> int:
        compared.append(original())
        return compared[-1]

    monkeypatch.setattr(collectives, "_ranks_per_machine", counted)
    for local in (4, 2):
        with simulate_ranks(4):
            pretend(local)
            group = dist.new_group(range(4))
            for _ in range(3):
                exchange_groups(group, CPU)
            reference = weakref.ref(group)
            dist.destroy_process_group(group)
            del group
        gc.collect()
        assert local == 2 or reference() is None, "an undivided group is not kept alive"
    assert compared == [4, 2]
