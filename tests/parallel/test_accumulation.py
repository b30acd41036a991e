from __future__ import annotations

from typing import Any

import pytest
import torch

from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.accumulation import (
    AccumulationMemory,
    bytes_per_step,
    choose,
    least_free_bytes,
)
from distmp.utils import cgroups
from tests.ranks import ranks

FACTS = AccumulationMemory(
    elements=1_000_000_000,
    free_bytes=100_000_000_000,
    shard_size=8,
    replicas=1,
    gradient_bytes=2,
    comm_bytes=4,
    weight_bytes=4,
    microbatches=4,
)


@pytest.mark.parametrize(
    ("changes", "place", "reason"),
    [
        ({}, "unsharded", "a rank sends 3.3 GiB per step instead of 13.0 GiB per step; the full "),
        ({"microbatches": None}, "unsharded", "3.3 GiB per step instead of 3.3 GiB per microbatch"),
        ({"microbatches": 1}, "sharded", "a step has one microbatch"),
        ({"free_bytes": 10**10}, "sharded", "gradients would take 3.7 GiB of 9.3 GiB free memory"),
        (
            {"free_bytes": 10**10, "replicas": 2},
            "hybrid",
            "gradients would take 3.7 GiB of 9.3 GiB free",
        ),
        ({"comm_bytes": 2}, "sharded", "gradients of one microbatch lose nothing in 16-bit"),
        ({"comm_bytes": 2, "replicas": 2}, "hybrid", "lose nothing in 16-bit communication"),
        # Autocast: gradients are FP32, so communication in 16 bits rounds them.
        (
            {"comm_bytes": 2, "gradient_bytes": 4},
            "unsharded",
            "1.6 GiB per step instead of 6.5 GiB",
        ),
        ({"weight_bytes": 2}, "unsharded", "FP32 sums for 16-bit weights"),
        ({"weight_bytes": 2, "replicas": 2}, "hybrid", "FP32 sums for 16-bit weights"),
    ],
)
def test_the_choice_and_its_reason(changes: dict[str, Any], place: str, reason: str) -> None:
    choice = choose("auto", FACTS._replace(**changes))
    assert choice.place == place
    assert reason in choice.reason


def test_a_single_rank_reports_no_communication() -> None:
    choice = choose("auto", FACTS._replace(shard_size=1))
    assert choice == ("unsharded", "the full FP32 gradients take 3.7 GiB of 93.1 GiB free memory")


def test_what_is_configured_is_taken() -> None:
    assert choose("sharded", FACTS) == ("sharded", "configured")
    with pytest.raises(ConfigError, match="'sharded': accumulates in the dtype of the weights"):
        choose("sharded", FACTS._replace(weight_bytes=2))


def test_bytes_are_those_of_rings() -> None:
    memory = FACTS._replace(elements=800, replicas=2, microbatches=3)
    scatter, across = 7 * 100 * 4, 2 * 100 * 4 // 2
    assert bytes_per_step("unsharded", memory) == scatter + across
    assert bytes_per_step("hybrid", memory) == 3 * scatter + across
    assert bytes_per_step("sharded", memory) == 3 * (scatter + across)


@ranks(2)
def test_ranks_agree_on_the_least_free_memory() -> None:
    world = World.current("cpu")

    class Memory:
        available = 2000 * (1 + world.rank)

    cgroups.psutil.virtual_memory = lambda: Memory  # the process ends after this
    assert least_free_bytes(world) == 1000


def test_free_memory_respects_the_limit_of_the_control_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "_memory_groups", lambda root: iter([(16_000, 0)]))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert least_free_bytes(World.current("cpu")) == 4_000


def test_what_the_cuda_allocator_holds_but_does_not_use_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000, 80_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20_000)
    assert least_free_bytes(World(0, 1, torch.device("cuda", 0), None)) == 1_000 + 30_000
