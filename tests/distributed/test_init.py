"""`distmp.init`: process group, device and seed of a script."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import distmp
from distmp.config import RunConfig
from distmp.distributed.world import leave
from distmp.errors import ConfigError
from tests.ports import reserved_port
from tests.ranks import from_all_ranks, ranks, run_ranks


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    with reserved_port() as port:
        monkeypatch.setenv("TEST_PORT", str(port))
        yield
    leave()


def drawn() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), np.random.rand(), random.random()


def test_single_process_is_seeded_like_manual_seed() -> None:
    world = distmp.init(device="cpu", seed=7)
    assert (world.rank, world.world_size, world.group) == (0, 1, None)
    first = drawn()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert drawn() == first


def test_second_call_must_agree_and_does_not_reseed() -> None:
    world = distmp.init(device="cpu", seed=7)
    first = drawn()
    assert distmp.init() == distmp.init(seed=7) == distmp.init(torch.device("cpu"), 7) == world
    assert drawn() != first
    with pytest.raises(ConfigError, match=r"seed = 8: the first call of distmp\.init had seed = 7"):
        distmp.init(seed=8)
    leave()
    world = distmp.init()
    assert distmp.init(device=world.device) == world
    with pytest.raises(ConfigError, match=r"seed = 7: .* had seed = None; pass it there"):
        distmp.init(seed=7)


def begin_anew(port: int) -> list[bool]:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True"
    )
    distmp.init(device="cpu", seed=3)
    numbers = [drawn()]
    distmp.init(seed=3)
    numbers.append(drawn())
    for seed in (3, 4):
        dist.destroy_process_group()
        assert distmp.init(seed=seed).world_size == 2
        numbers.append(drawn())
    return [each == numbers[0] for each in numbers]


def test_first_call_after_the_group_was_destroyed_seeds_again() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = run_ranks(begin_anew, 2, server.port, initialize=False)
    assert found == [[True, False, True, False]] * 2


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "0"])
def test_seeds_out_of_range_are_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match="must be an integer from 0 to"):
        distmp.init(device="cpu", seed=seed)
    distmp.init(device="cpu", seed=0)  # nothing has been remembered


def test_largest_seed_of_a_run_seeds_all_generators() -> None:
    distmp.init(device="cpu", seed=RunConfig(seed=2**63 - 1).seed)
    assert torch.initial_seed() == 2**63 - 1
    assert np.random.rand() == np.random.RandomState(2**32 - 1).rand()


def test_engine_and_loader_use_device_of_init(monkeypatch: pytest.MonkeyPatch) -> None:
    distmp.init(device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    engine = distmp.Engine(
        torch.nn.Linear(2, 1),
        lambda model, batch: (model(batch).sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.1),
        policy="fp32",
    )
    assert engine.device == distmp.DataLoader([1], 1, 1)._world.device == torch.device("cpu")


@ranks(2, initialize=False)
def test_launched_ranks_train_one_model() -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"])
    world = distmp.init(seed=3)
    assert (world.rank, world.world_size) == (int(os.environ["RANK"]), 2)
    assert dist.is_initialized()
    model = torch.nn.Linear(4, 1)
    initial = [torch.empty_like(model.weight) for _ in range(2)]
    dist.all_gather(initial, model.weight.detach())
    assert torch.equal(*initial)
    engine = distmp.Engine(
        model,
        lambda model, batch: (model(batch).square().sum(), len(batch)),
        lambda named: torch.optim.SGD(named, lr=0.1),
        policy="fp32",
    )
    assert engine.world == world == distmp.init()
    data = torch.randn(12, 4)
    reference = torch.nn.Linear(4, 1)
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    loader = distmp.DataLoader(data, batch_size=6, microbatch_size=1, shuffle=False)
    for epoch in range(3):
        assert loader.epoch == epoch
        for step, microbatches in enumerate(loader):
            engine.step(microbatches)
            optimizer.zero_grad()
            reference(data[6 * step :][:6]).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(engine.module.weight, reference.weight)
    wrapper = DistributedDataParallel(reference)
    wrapper(data).sum().backward()
    reducer, alive = weakref.ref(wrapper.reducer), []
    destroy = dist.destroy_process_group
    dist.destroy_process_group = lambda: (alive.append(reducer()), destroy())
    leave()  # with the last reference, the reducer could wait for itself in gloo's destructor
    assert alive == [None]


def drawing_engine(found: list[tuple[Any, ...]]) -> distmp.Engine:
    """Build an engine whose loss draws random numbers."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        found.append(drawn())
        return model(batch).square().sum(), len(batch)

    model = torch.nn.Linear(4, 1)
    sgd = lambda named: torch.optim.SGD(named, lr=0.1)  # noqa: E731
    return distmp.Engine(model, loss, sgd, policy="fp32", device="cpu", first_step_checks=False)


@ranks(2, initialize=False)
def test_random_numbers_differ_by_rank_and_resume(tmp_path: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["TEST_PORT"])
    distmp.init(seed=3)
    found: list[tuple[Any, ...]] = []
    engine = drawing_engine(found)
    before = torch.get_rng_state(), np.random.get_state()[1], random.getstate()
    batches = [torch.ones(2, 4)] * 3
    engine.step(batches)
    engine.save(tmp_path)
    engine.step(iter(batches), count=3)
    engine.evaluate(batches)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()
    everyone = from_all_ranks(found)
    for one_kind in zip(*everyone[0], *everyone[1], strict=True):
        assert len(set(map(str, one_kind))) == 18

    torch.manual_seed(dist.get_rank())
    continued: list[tuple[Any, ...]] = []
    engine = drawing_engine(continued)
    engine.load(tmp_path)
    engine.step(batches)
    engine.evaluate(batches)
    assert continued == found[3:]
