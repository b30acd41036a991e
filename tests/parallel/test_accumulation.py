from __future__ import annotations

from typing import Any

import pytest
import torch

from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.parallel.fsdp_setup import AccumulationChoice, choose, least_free_bytes
from distmp.precision import policy
from distmp.utils import processes
from tests.ranks import ranks


def choice(requested: Any = "auto", text: str = "bf16", **changes: Any) -> AccumulationChoice:
    sizes = {"elements": 10**9, "free_bytes": 10**11, "microbatches": 4}
    return choose(requested, policy(text), **(sizes | changes))


@pytest.mark.parametrize(
    ("text", "changes", "place", "reason"),
    [
        ("bf16", {}, "unsharded", "the full FP32 gradients take 3.7 GiB of 93.1 GiB free memory"),
        ("bf16", {"microbatches": None}, "unsharded", "the full FP32 gradients take"),
        ("bf16", {"microbatches": 1}, "sharded", "a step has one microbatch"),
        ("bf16", {"free_bytes": 10**10}, "sharded", "would take 3.7 GiB of 9.3 GiB free memory"),
        ("bf16", {"free_bytes": 10**10, "replicas": 2}, "hybrid", "gradients would take 3.7 GiB"),
        ("bf16,reduce=bf16", {}, "sharded", "gradients of one microbatch lose nothing in 16-bit"),
        ("bf16,reduce=bf16", {"replicas": 2}, "hybrid", "lose nothing in 16-bit communication"),
        # Autocast: gradients are FP32, so communication in 16 bits rounds them.
        ("bf16-autocast,reduce=bf16", {}, "unsharded", "the full FP32 gradients take"),
        ("bf16-pure", {}, "unsharded", "FP32 sums for 16-bit weights"),
        ("bf16-pure", {"replicas": 2}, "hybrid", "FP32 sums for 16-bit weights"),
    ],
)
def test_accumulation_is_chosen_with_a_reason(
    text: str, changes: dict[str, Any], place: str, reason: str
) -> None:
    found = choice(text=text, **changes)
    assert found.place == place
    assert reason in found.reason


def test_configured_accumulation_is_used() -> None:
    assert choice("sharded") == ("sharded", "configured")
    with pytest.raises(ConfigError, match="'sharded': accumulates in the dtype of the weights"):
        choice("sharded", "bf16-pure")


@pytest.mark.nightly
@ranks(2)
def test_ranks_agree_on_the_least_free_memory() -> None:
    world = World.current("cpu")

    class Memory:
        available = 2000 * (1 + world.rank)

    processes.psutil.virtual_memory = lambda: Memory  # the process ends after this
    assert least_free_bytes(world) == 1000


def test_free_memory_respects_the_limit_of_the_control_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "_memory_groups", lambda root: iter([(16_000, 0)]))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert least_free_bytes(World.current("cpu")) == 4_000


def test_what_the_cuda_allocator_holds_but_does_not_use_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000, 80_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20_000)
    assert least_free_bytes(World(0, 1, torch.device("cuda", 0), None)) == 1_000 + 30_000
