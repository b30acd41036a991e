"""AdamW with state in 8 and 16 bits under every strategy: bits, checkpoints and conversions."""

from __future__ import annotations

import functools
import itertools
import logging
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
from tests.ranks import run_ranks

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
    """Has matrices with and without blocks, vectors, and fewer rows than ranks."""

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


def build(kind: str, policy: str, state: str | None, *, plain: bool = False) -> Engine:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        if plain:
            return torch.optim.AdamW(named, lr=0.01, fused=True)
        return AdamW(named, lr=0.01, state=state, seed=7)

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


# Policy and state of each run.
RUNS = [("fp32", "bf16"), ("bf16", "fp8"), (PURE, "fp8"), (PURE, None)]
# Strategies whose checkpoints are loaded at another number of ranks.
STORED = ["shard_optimizer", "fsdp"]


def supported(kind: str, policy: str, state: str | None) -> bool:
    return not (kind == "shard_optimizer" and policy == PURE)


def trained(
    kinds: list[str], folder: Path | None, starts: list[str]
) -> dict[Any, dict[str, Tensor]]:
    """Return the states after all steps, and save checkpoints after half of them.

    Args:
        kinds: Strategies.
        folder: Where to save checkpoints; None saves none.
        starts: Strategies whose checkpoints to start from; empty: from the beginning.
    """
    found = {}
    for kind, (policy, state), start in itertools.product(kinds, RUNS, starts or [""]):
        saved = Path(f"{folder}/{start}-{policy}-{state}")
        if not supported(kind, policy, state) or (start and not saved.exists()):
            continue
        engine = build(kind, policy, state)
        if start:
            engine.load(saved)
        else:
            take_steps(engine, 0, STEPS // 2)
            if folder is not None:
                engine.save(f"{folder}/{kind}-{policy}-{state}")
        take_steps(engine, STEPS // 2, STEPS // 2)
        found[kind, policy, state, start] = full_state(engine)
    return found


@pytest.mark.nightly
def test_bits_do_not_depend_on_ranks_strategy_and_resume(tmp_path: Path) -> None:
    expected = run_ranks(trained, 1, ["single"], None, [])[0]
    found = [
        run_ranks(trained, 2, ["ddp", "shard_optimizer", "fsdp"], tmp_path, [])[0],
        run_ranks(trained, 4, ["shard_optimizer", "fsdp", "hsdp"], tmp_path, STORED)[0],
        trained(["single"], tmp_path, ["fsdp"]),
    ]
    assert [len(states) for states in found] == [10, 16, 4]
    for states in found:
        for (kind, policy, state, start), values in states.items():
            same = expected["single", policy, state, ""]
            assert values.keys() == same.keys()
            for name, value in values.items():
                assert torch.equal(value, same[name]), (kind, policy, state, start, name)


def converted(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Load FP8 state into torch's AdamW, and its state into FP8, under every strategy."""
    found = {}
    for kind in ("shard_optimizer", "fsdp"):
        plain = build(kind, "fp32", None, plain=True)
        plain.load(folder)
        found[f"{kind}, plain"] = full_state(plain)
        take_steps(plain, 0, 1)
        plain.load(folder)
        plain.save(f"{folder}-{kind}")
        again = build(kind, "fp32", "fp8")
        again.load(f"{folder}-{kind}")
        found[f"{kind}, again"] = full_state(again)
        take_steps(again, 0, 1)
    mesh = init_device_mesh("cpu", (2,))
    columns = distribute_tensor(torch.ones(64, 64), mesh, [Shard(1)]).requires_grad_()
    columns.grad = torch.ones_like(columns)
    with pytest.raises(ConfigError, match=r"sharded as .*dim=1.*, not by rows; use torch"):
        AdamW([("w", columns)], state="fp8").step()
    return found


def test_states_are_converted_under_every_strategy(tmp_path: Path) -> None:
    engine = build("single", "fp32", "fp8")
    take_steps(engine, 0, 2)
    state = engine.state_dict()
    engine.save(tmp_path / "fp8")
    found = run_ranks(converted, 2, tmp_path / "fp8")[0]
    for name in ("first", "second", "last"):
        key = f"optimizer/{name}.weight/"
        exact = state[key + "exp_avg"].float()
        if key + "exp_avg_scale" in state:
            scales = state[key + "exp_avg_scale"]
            exact = (exact.view(*scales.shape, -1) * scales.unsqueeze(-1)).view(exact.shape)
        for kind in ("shard_optimizer", "fsdp"):
            plain, again = found[f"{kind}, plain"], found[f"{kind}, again"]
            assert torch.equal(plain[key + "exp_avg"].view(torch.float32), exact.view(-1))
            second = state[key + "exp_avg_sq"].float().view(-1)
            assert torch.equal(plain[key + "exp_avg_sq"].view(torch.float32), second)
            codes = again[key + "exp_avg"].view(state[key + "exp_avg"].dtype)
            if key + "exp_avg_scale" in state:
                scales = again[key + "exp_avg_scale"].view(torch.float32)
                values = (codes.float().view(len(scales), -1) * scales.unsqueeze(-1)).view(-1)
                torch.testing.assert_close(values, exact.view(-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("policy", ["bf16", "bf16-pure"])
def test_a_conversion_is_one_message(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    lean, plain = build("single", policy, "fp8"), build("single", policy, None, plain=True)
    take_steps(lean, 0, 1)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "distmp"):
        plain.load_state_dict(lean.state_dict())
        lean.load_state_dict(lean.state_dict())
    assert caplog.messages == [
        "the state has another format of moments than this engine (optim.state); those of "
        "first.weight, last.weight are converted"
    ]
    take_steps(plain, 1, 1)


@pytest.mark.parametrize(("stored", "loaded"), [("bf16-pure", "bf16"), ("fp32", "bf16-pure")])
def test_moments_of_torch_get_the_dtype_of_the_weights(stored: str, loaded: str) -> None:
    """Kernels of torch fail on moments in another dtype."""
    first = build("single", stored, None, plain=True)
    take_steps(first, 0, 1)
    second = build("single", loaded, None, plain=True)
    second.load_state_dict(first.state_dict())
    take_steps(second, 1, 1)
    moments = [state["exp_avg"].dtype for state in second.optimizer.state.values()]
    assert set(moments) == {torch.bfloat16 if loaded == "bf16-pure" else torch.float32}


def test_bytes_per_parameter() -> None:
    engine = Engine(
        nn.Linear(1024, 1024),
        loss,
        lambda named: AdamW(named, state="fp8"),
        policy=PURE,
        strategy="single",
    )
    engine.step([torch.ones(1, 1024)])
    uses = engine.tensors_by_use()
    kept = sum(tensor.nbytes for tensor in uses["optimizer state"] + uses["master weights"])
    assert kept / (1024 * 1025) < 5 + 4 / 32 + 0.01


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
