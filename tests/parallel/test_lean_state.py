"""AdamW that rounds stochastically under every strategy: bits and checkpoints."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distmp import Engine
from distmp.errors import ConfigError
from distmp.optim import AdamW
from distmp.parallel.settings import ParallelConfig, ShardingConfig
from distmp.utils.flat_shard import gathered, local_parts
from tests.ranks import ranks, run_ranks

PURE = "bf16-pure,stochastic_rounding=true"
SAMPLES, STEPS = 8, 4
KINDS: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "shard_optimizer": {"strategy": "ddp", "shard_optimizer": True},
    "fsdp": {"strategy": "fsdp"},
    "hsdp": {
        "strategy": "hsdp",
        "parallel": ParallelConfig(sharding=ShardingConfig(shard_size=2)),
    },
}


class Net(nn.Module):
    """Has matrices, vectors, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(96, 70)
        self.second = nn.Linear(70, 64)
        self.last = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


SHAPES = {name: parameter.shape for name, parameter in Net().named_parameters()}


def loss(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return module(batch).float().square().sum(), len(batch)


def build(kind: str, policy: str, *, plain: bool = False) -> Engine:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        if plain:
            return torch.optim.AdamW(named, lr=0.01, fused=True)
        return AdamW(named, lr=0.01, seed=7)

    return Engine(Net(), loss, optimizer, policy=policy, **KINDS[kind])


def take_steps(engine: Engine, first: int, count: int) -> None:
    """Step with gradients that are the same bits at any number of ranks."""
    for step in range(first, first + count):

        def replace(*_: Any, step: int = step) -> None:
            for index, (name, gradient) in enumerate(sorted(engine.gradients().items())):
                generator = torch.Generator().manual_seed(100 * step + index)
                values = torch.randn(SHAPES[name], generator=generator)
                assert gradient is not None
                for indices, memory in local_parts(gradient):
                    memory.copy_(values[indices])

        hook = engine.optimizer.register_step_pre_hook(replace)
        engine.step([torch.ones(SAMPLES // engine.world.world_size, 96)])
        hook.remove()


def full_state(engine: Engine) -> dict[str, Tensor]:
    """Return the bits of the full weights and optimizer state."""
    return {
        name: gathered(tensor).detach().clone().contiguous().view(-1).view(torch.uint8)
        for name, tensor in engine.state_dict().items()
        if name.startswith(("model/", "optimizer/"))
    }


POLICIES = ["fp32", "bf16", PURE]
# Strategies whose checkpoints are loaded at another number of ranks.
STORED = ["shard_optimizer", "fsdp"]


def supported(kind: str, policy: str) -> bool:
    return not (kind == "shard_optimizer" and policy == PURE)


def trained(
    kinds: list[str], directory: Path | None, starts: list[str]
) -> dict[Any, dict[str, Tensor]]:
    """Return the states after all steps, and save checkpoints after half of them.

    Args:
        kinds: Strategies.
        directory: Where to save checkpoints; None saves none.
        starts: Strategies whose checkpoints to start from; empty: from the beginning.
    """
    found = {}
    for kind, policy, start in itertools.product(kinds, POLICIES, starts or [""]):
        saved = Path(f"{directory}/{start}-{policy}")
        if not supported(kind, policy) or (start and not saved.exists()):
            continue
        engine = build(kind, policy)
        if start:
            engine.load(saved)
        else:
            take_steps(engine, 0, STEPS // 2)
            if directory is not None:
                engine.save(f"{directory}/{kind}-{policy}")
        take_steps(engine, STEPS // 2, STEPS // 2)
        found[kind, policy, start] = full_state(engine)
    return found


@pytest.mark.nightly
def test_bits_do_not_depend_on_ranks_strategy_and_resume(tmp_path: Path) -> None:
    expected = run_ranks(trained, 1, ["single"], None, [])[0]
    found = [
        run_ranks(trained, 2, ["ddp", "shard_optimizer", "fsdp"], tmp_path, [])[0],
        run_ranks(trained, 4, ["shard_optimizer", "fsdp", "hsdp"], tmp_path, STORED)[0],
        trained(["single"], tmp_path, ["fsdp"]),
    ]
    assert [len(states) for states in found] == [8, 14, 3]
    for states in found:
        for (kind, policy, start), values in states.items():
            same = expected["single", policy, ""]
            assert values.keys() == same.keys()
            for name, value in values.items():
                assert torch.equal(value, same[name]), (kind, policy, start, name)


@ranks(2)
def test_tensors_that_are_sharded_by_columns_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    columns = distribute_tensor(torch.ones(64, 64), mesh, [Shard(1)]).requires_grad_()
    columns.grad = torch.ones_like(columns)
    with pytest.raises(ConfigError, match=r"sharded as .*dim=1.*, not by rows; use torch"):
        AdamW([("w", columns)]).step()


@pytest.mark.parametrize(("stored", "loaded"), [("bf16-pure", "bf16"), ("fp32", "bf16-pure")])
def test_moments_of_torch_get_the_dtype_of_the_weights(stored: str, loaded: str) -> None:
    """Kernels of torch fail on moments in another dtype."""
    first = build("single", stored, plain=True)
    take_steps(first, 0, 1)
    second = build("single", loaded, plain=True)
    second.load_state_dict(first.state_dict())
    take_steps(second, 1, 1)
    moments = [state["exp_avg"].dtype for state in second.optimizer.state.values()]
    assert set(moments) == {torch.bfloat16 if loaded == "bf16-pure" else torch.float32}


@pytest.mark.parametrize(
    ("policy", "optimizer", "message"),
    [
        (
            PURE,
            torch.optim.AdamW,
            r"stochastic_rounding = True: needs an optimizer that rounds, which AdamW does not; "
            r"use distmp\.optim\.AdamW",
        ),
        (
            "bf16-pure",
            functools.partial(AdamW, stochastic_rounding=True),
            r"'stochastic_rounding=True': contradicts the policy 'bf16-pure'; use 'bf16-pure,stoch",
        ),
    ],
)
def test_rounding_that_the_optimizer_cannot_do_is_refused(
    policy: str, optimizer: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(Net(), loss, lambda named: optimizer(named), policy=policy, strategy="single")
