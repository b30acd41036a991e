from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.engine.setup import build_model
from distmp.errors import ConfigError
from distmp.models.transformer import Transformer, TransformerConfig
from distmp.parallel.materialize import initial_values, materialize, materialize_shards
from distmp.utils.deferred import build_whole
from tests.ranks import in_turn, ranks, run_ranks
from tests.reference import assert_same_bits, gathered, sum_of_squares

SMALL = TransformerConfig(
    vocabulary_size=67, sequence_length=8, layers=2, dimension=16, heads=2, hidden=20
)
SEED = 11


def small() -> nn.Module:
    return Transformer(SMALL)


def small_on_meta() -> nn.Module:
    with torch.device("meta"):
        return small()


def next_token(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    logits = module(batch[:, :-1]).float()
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
    )
    return loss, batch[:, 1:].numel()


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def digest_of_start(strategy: str, policy: str, model: Any) -> str:
    """Return a digest of the initial weights of an engine."""
    torch.manual_seed(SEED)
    engine = Engine(model, next_token, sgd, policy=policy, strategy=strategy)
    weights = {
        name: tensor for name, tensor in engine.state_dict().items() if name.startswith("model/")
    }
    digest = hashlib.sha256()
    for name, value in sorted(gathered(weights).items()):
        digest.update(name.encode() + value.float().numpy().tobytes())
    outcome = engine.step([torch.arange(16).view(2, 8)])
    assert not outcome.numbers.skipped
    return digest.hexdigest()


def whole() -> nn.Module:
    """Build the model with the values that an engine computes for it after the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return build_whole(small, int(torch.randint(2**62, ())))


@pytest.mark.parametrize(
    ("world_size", "strategies"), [(2, ("ddp", "fsdp")), (4, ("fsdp", "hsdp"))]
)
def test_initial_weights_do_not_depend_on_strategy_or_ranks(
    world_size: int, strategies: tuple[str, ...]
) -> None:
    expected = digest_of_start("single", "fp32", whole())
    assert digest_of_start("single", "fp32", small) == expected
    assert digest_of_start("single", "fp32", small_on_meta()) == expected
    for results in run_ranks(_digests_of_start, world_size, strategies):
        assert results == [expected] * len(strategies)


def _digests_of_start(strategies: tuple[str, ...]) -> list[str]:
    return [digest_of_start(strategy, "fp32", small) for strategy in strategies]


@ranks(2)
def test_16_bit_weights_are_rounded_once() -> None:
    starts = [
        digest_of_start(strategy, "bf16-pure", model)
        for strategy, model in (("fsdp", small), ("ddp", small), ("ddp", whole()))
    ]
    assert len(set(starts)) == 1


@ranks(2)
def test_without_initial_values_weights_are_not_a_number() -> None:
    engine = Engine(small, next_token, sgd, policy="fp32", strategy="fsdp", initialize=False)
    assert all(value.isnan().all() for value in engine.module.state_dict().values())


def test_without_initial_values_a_state_can_be_loaded() -> None:
    engine = Engine(small, next_token, sgd, policy="fp32", strategy="single", initialize=False)
    assert all(value.isnan().all() for value in engine.module.state_dict().values())
    state = Engine(small, next_token, sgd, policy="fp32", strategy="single").state_dict()
    engine.load_state_dict(state)
    assert_same_bits(engine.state_dict(), state)


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_initial_weights_follow_the_generator_of_rank_0(strategy: str) -> None:
    def start(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        engine = Engine(small, next_token, sgd, policy="fp32", strategy=strategy)
        weights = engine.state_dict()
        return gathered({n: t for n, t in weights.items() if n.startswith("model/")})

    assert_same_bits(start(dist.get_rank()), start(0))


@ranks(2)
def test_parts_on_the_meta_device() -> None:
    """Real parameters get rank 0's values, the others are computed."""

    def partly() -> nn.Module:
        torch.manual_seed(dist.get_rank())
        with torch.device("meta"):
            second = nn.Linear(6, 3)
        return nn.Sequential(nn.Linear(4, 6), second)

    for strategy in ("ddp", "fsdp"):
        engine = Engine(partly(), sum_of_squares, sgd, policy="fp32", strategy=strategy)
        torch.manual_seed(0)
        first = nn.Linear(4, 6)
        values = gathered({f"model/{n}": t for n, t in engine.module.state_dict().items()})
        assert torch.equal(values["model/0.weight"], first.weight)
        assert values["model/1.weight"].abs().max() <= 6**-0.5
        engine.step([torch.ones(2, 4)])


class OfRank(nn.Module):
    """Adds to a parameter, and scales another with a random number of Python."""

    def __init__(self, added: float) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        with torch.no_grad():
            self.body.weight.mul_(random.random())
            self.head.weight.add_(added)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@ranks(2)
def test_a_constructor_whose_values_differ_between_ranks_is_refused_for_shards() -> None:
    rank = dist.get_rank()
    random.seed(rank)
    norms = {}
    for strategy, added in (("ddp", rank), ("fsdp", 0)):
        torch.manual_seed(rank)

        def build(added: int = added) -> nn.Module:
            return OfRank(added)

        engine = Engine(build, sum_of_squares, sgd, policy="fp32", strategy=strategy)
        norms[strategy] = engine.step([torch.ones(2, 4)]).numbers.grad_norm
    assert norms["ddp"] == pytest.approx(norms["fsdp"])  # rank 0's values, whatever ranks drew
    message = (
        r"^initial values of head\.weight, operation 3 = .*add_.*, 0.* on rank 0; .*, 1.* on rank 1"
        r": differs between ranks; use the same on every rank$"
    )
    with pytest.raises(ConfigError, match=message):
        Engine(lambda: OfRank(rank), sum_of_squares, sgd, policy="fp32", strategy="fsdp")
    # Values that are loaded later do not matter.
    Engine(
        lambda: OfRank(rank),
        sum_of_squares,
        sgd,
        policy="fp32",
        strategy="fsdp",
        initialize=False,
    )


def test_buffers_that_modules_share_stay_shared() -> None:
    first, second = nn.BatchNorm1d(3, device="meta"), nn.BatchNorm1d(3, device="meta")
    second.running_mean = first.running_mean
    module = nn.Sequential(first, second)
    values = initial_values(module, 0, None, initialize=False)
    materialize(module, values, torch.device("cpu"), parameters=False)
    assert first.running_mean is second.running_mean
    assert not any(buffer.is_meta for buffer in module.buffers())
    assert all(parameter.is_meta for parameter in module.parameters())


class Token(nn.Module):
    """Draws the values of small tensors, which have memory, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(1, 4))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.token.copy_(nn.init.trunc_normal_(torch.zeros(1, 4)))


@pytest.mark.parametrize("model", [lambda: Token(), Token().to("meta")])
def test_the_generator_of_the_gpu_does_not_change(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.manual_seed` seeds it too: the dropout of all ranks would be the same."""
    states = ["before"]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.append(state))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: states.append(str(seed)))
    build_model(model, World(0, 1, torch.device("cuda", 0), None), initialize=True)
    assert len(states) > 2
    assert states[-1] == "before"


@ranks(2)
def test_replicas_of_a_shard_have_the_bits_of_the_first_one() -> None:
    """Other hardware may compute other bits."""
    with torch.device("meta"):
        module = nn.Linear(4, 6, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("copy", "shard")))
    rank, cpu = float(dist.get_rank()), torch.device("cpu")
    materialize_shards(module, lambda _, device: torch.full((), rank).expand(6, 4), cpu)
    assert (module.weight.to_local() == 0).all()


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_frozen_parameters_stay_frozen(strategy: str) -> None:
    def half_frozen() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3).requires_grad_(False))

    engine = Engine(half_frozen, sum_of_squares, sgd, policy="fp32", strategy=strategy)
    trained = [parameter.requires_grad for parameter in engine.module.parameters()]
    assert trained == [True, True, False, False]
    assert engine.updated_by_optimizer() >= {"model/0.weight", "model/0.bias"}
    assert "model/1.weight" not in engine.updated_by_optimizer()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_tied_weights_stay_one(strategy: str) -> None:
    engine = Engine(lambda: Tied(), next_token, sgd, policy="fp32", strategy=strategy)
    engine.step([torch.arange(8).view(2, 4)])
    state = engine.state_dict()
    weights = gathered({n: t for n, t in state.items() if n.startswith("model/")})
    assert len({weight.numpy().tobytes() for weight in weights.values()}) == 1


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def test_a_module_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = NoReset()
    message = r"nothing sets the initial values of gain; pass the constructor"
    with pytest.raises(ConfigError, match=message):
        Engine(model, next_token, sgd, policy="fp32")


class Forgotten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))


def test_constructor_without_initial_values_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"values of gain; set them in the constructor, for ex"):
        Engine(lambda: Forgotten(), next_token, sgd, policy="fp32")


class Unloaded(nn.Module):
    """Has a parameter without an initial value, and a buffer that is not in the state dict."""

    def __init__(self, ends: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(3))
        self.register_buffer("ends", ends, persistent=False)


def test_only_values_that_are_loaded_need_no_initial_one() -> None:
    options: dict[str, Any] = {"policy": "fp32", "initialize": False}
    engine = Engine(lambda: Unloaded(torch.arange(70_000)), next_token, sgd, **options)
    assert torch.equal(engine.model.ends, torch.arange(70_000))
    assert engine.model.gain.isnan().all()
    with pytest.raises(ConfigError, match="sets the initial values of ends; set them in the con"):
        Engine(lambda: Unloaded(torch.empty(3)), next_token, sgd, **options)


def test_a_constructor_that_cannot_be_recorded_is_named() -> None:
    def build() -> nn.Module:
        return nn.Linear(3, 3).half()

    message = r"^model = '.*build': the constructor converts its .*; pass the model itself"
    with pytest.raises(ConfigError, match=message):
        Engine(build, next_token, sgd, policy="fp32")
