from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.errors import ConfigError, TrainingError
from distmp.models.loss import next_token_loss
from distmp.models.transformer import Head, Transformer, TransformerConfig
from distmp.parallel.build_strategy import build_strategy
from distmp.parallel.fsdp import FullySharded
from distmp.parallel.strategy import Strategy
from distmp.precision import policy
from tests.parallel.sharding import sharded
from tests.ranks import in_turn, ranks
from tests.recording import Operators
from tests.reference import (
    INPUTS,
    TWO_RANKS,
    Batch,
    assert_same_bits,
    foreach_adamw,
    fused_adagrad,
    fused_adamw,
    fused_sgd,
    gathered,
    loss,
    make_engine,
    make_model,
    microbatches,
    replace_loss,
    samples,
    snapshot,
    sum_of_squares,
    train,
    trained,
    weights,
)


class WideAngles(nn.Module):
    """Passes an FP32 tensor to its blocks, like rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Turned()])
        self.register_buffer("angles", torch.full((6,), 1.001))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.angles)
        return x


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        self.seen += [x.dtype, angles.dtype]
        return self.linear(x) * angles.to(x.dtype)


@ranks(2)
def test_frozen_16_bit_parameters_of_kept_modules_become_fp32() -> None:
    losses = []
    for strategy in ("ddp", "fsdp"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(INPUTS, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        model[1].to(torch.bfloat16).requires_grad_(False)
        engine = Engine(
            model,
            lambda module, inputs: (module(inputs).square().sum(), len(inputs)),
            fused_adamw,
            policy="bf16,keep_fp32=norm",
            strategy=strategy,
            device="cpu",
        )
        losses.append(engine.step([samples(0, 4).inputs]).numbers.loss)
        assert model[1].weight.dtype == torch.float32
    assert losses[0] == losses[1]


@ranks(2)
def test_block_inputs_equal_those_without_sharding() -> None:
    for strategy in ("ddp", "fsdp"):
        model = WideAngles()
        output = make_engine(model=model, policy="bf16", strategy=strategy).module(torch.ones(2, 6))
        assert model.blocks[0].seen == [torch.bfloat16, torch.float32]
        assert output.dtype == torch.float32


def small_transformer(*, tied: bool) -> Transformer:
    return Transformer(
        TransformerConfig(11, 8, layers=2, dimension=8, heads=2, hidden=12, tied_head=tied)
    )


def units(engine: Engine) -> list[str]:
    return [name for name, _ in engine._setup.strategy.units()]


@ranks(2)
def test_embedding_and_head_are_groups_unless_they_share_a_weight() -> None:
    blocks = ["", "blocks.0", "blocks.1"]
    tokens = torch.arange(18).view(2, 9) % 11
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    found = []
    for own_group in (True, False):
        with mock.patch.object(Head, "own_group", own_group):
            torch.manual_seed(0)
            model = small_transformer(tied=False)
            model.embedding.own_group = own_group
            engine = make_engine(model=model, loss=next_token_loss, strategy="fsdp")
        added = {"embedding", "head"} if own_group else set()
        assert {*units(engine)} == {*blocks, *added}
        for _ in range(2):
            engine.step([batch, batch])
        found.append(weights(engine))
    assert_same_bits(*found)
    engine = make_engine(model=small_transformer(tied=True), loss=next_token_loss, strategy="fsdp")
    assert units(engine) == blocks


class NormalizingHead(nn.Module):
    own_group = True

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@ranks(2)
def test_kept_module_inside_of_a_module_with_own_group_is_a_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4), NormalizingHead())
    engine = make_engine(
        model=model, loss=sum_of_squares, strategy="fsdp", policy="bf16,keep_fp32=norm"
    )
    assert units(engine) == ["", "1", "1.norm"]
    seen: list[torch.dtype] = []
    model[1].norm.register_forward_hook(lambda part, *_: seen.append(part.weight.dtype))
    engine.step([torch.ones(2, 4)])
    assert seen == [torch.float32]


class Tied(nn.Module):
    """Modules with one weight that ask for groups of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(4, 4), nn.ModuleList(), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        for part in (self.first, self.last):
            part.own_group = True

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@ranks(2)
def test_modules_with_a_shared_weight_are_one_group() -> None:
    engine = make_engine(model=Tied(), loss=sum_of_squares, strategy="fsdp")
    assert units(engine) == [""]
    engine.step([torch.ones(2, 4)])


@ranks(2)
@in_turn("precision", ["fp32", "bf16"])
def test_shards_are_fp32_and_a_group_stands_for_each_block(precision: str) -> None:
    engine = make_engine(policy=precision, strategy="fsdp")
    train(engine, 1, TWO_RANKS)
    units = [name for name, part in engine.module.named_modules() if isinstance(part, FSDPModule)]
    assert units == ["", "blocks.0", "blocks.1"]
    for name, parameter in engine.module.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert parameter.to_local().numel() < parameter.numel()
    assert all(isinstance(value, DTensor) for _, value in model_entries(engine.state_dict()))


def model_entries(state: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in state.items() if name.startswith("model/")]


@ranks(2)
def test_gradients_are_summed_in_fp32_over_microbatches_and_ranks() -> None:
    # In bfloat16 adding the small values to the first one would change nothing.
    factors = [[1.0, *[2.0**-9] * 16], [2.0**-9] * 17][dist.get_rank()]
    batches = [samples(step, 1)._replace(factor=factor) for step, factor in enumerate(factors)]
    found = {}
    for strategy in ("fsdp", "ddp"):
        engine = make_engine(policy="bf16", strategy=strategy, optimizer=without_a_step)
        engine.step(batches)
        found[strategy] = gathered(
            {name: parameter.grad for name, parameter in engine.module.named_parameters()}
        )
    for name, expected in found["ddp"].items():  # other tests compare it with float64
        assert found["fsdp"][name].dtype == torch.float32
        torch.testing.assert_close(found["fsdp"][name], expected, rtol=1e-6, atol=1e-8)


class Repeating(nn.Module):
    """Uses a weight so often that a sum of ones in bfloat16 would stop at 256."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(self.weight.sum() for _ in range(300))


@ranks(2)
def test_uses_of_one_weight_in_a_backward_are_summed_in_fp32() -> None:
    for place in ("sharded", "unsharded"):
        engine = Engine(
            Repeating(),
            lambda module, batch: (module(batch), 1.0),
            without_a_step,
            policy="bf16",
            device="cpu",
            **sharded("fsdp", accumulate=place),
        )
        numbers = engine.step([torch.zeros(())] * 3).numbers
        assert numbers.grad_norm == pytest.approx(300 * 4**0.5, rel=1e-6), place


@ranks(2)
def test_fsdp_converts_16_bit_gradients_without_copies_and_to_the_same_bits() -> None:
    for place in ("sharded", "unsharded"):
        found, copies = {}, {}
        for context in (FullySharded.backward_context, Strategy.backward_context):
            with (
                mock.patch.object(FullySharded, "backward_context", context),
                Operators() as operators,
            ):
                engine = make_engine(policy="bf16", **sharded("fsdp", accumulate=place))
                train(engine, 3, TWO_RANKS)
            copies[context] = operators.counts["aten::_to_copy"]
            found[context] = weights(engine)
        assert_same_bits(*found.values())
        # Of 11 parameters in 3 steps: in both microbatches, or where gradients are added.
        without, with_copies = copies.values()
        assert with_copies - without == {"sharded": 3 * 2 * 11, "unsharded": 3 * 11}[place]


class Fp32Gradient(torch.autograd.Function):
    """A product whose backward computes the gradient of a 16-bit weight in FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient.float() * x.float()).sum(0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, INPUTS)
        self.scale = nn.Parameter(torch.linspace(1, 2, INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return Fp32Gradient.apply(self.linear(x), self.scale)


@ranks(2)
def test_fp32_gradients_of_16_bit_weights_are_not_rounded() -> None:
    batches = [samples(step, 3).inputs for step in range(2)]
    for place in ("sharded", "unsharded"):
        found = []
        for context in (FullySharded.backward_context, Strategy.backward_context):
            with mock.patch.object(FullySharded, "backward_context", context):
                torch.manual_seed(0)
                engine = make_engine(
                    model=Scaled(),
                    loss=sum_of_squares,
                    policy="bf16",
                    **sharded("fsdp", accumulate=place),
                )
                engine.step(batches)
            found.append(weights(engine))
        assert_same_bits(*found)


def without_a_step(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", [fused_adamw, foreach_adamw, fused_sgd, fused_adagrad])
@ranks(2)
def test_a_loaded_state_continues_bit_by_bit(
    optimizer: Callable[[Any], torch.optim.Optimizer],
) -> None:
    def new_engine(seed: int) -> Any:
        model = make_model(seed)
        return make_engine(model=model, optimizer=optimizer, policy="fp16", strategy="fsdp")

    engine, resumed = new_engine(0), new_engine(1)
    train(engine, 4, TWO_RANKS)
    saved = {name: value.clone() for name, value in engine.state_dict().items()}
    resumed.load_state_dict(saved)
    expected = train(engine, 4, TWO_RANKS, first=4)
    assert train(resumed, 4, TWO_RANKS, first=4) == expected
    assert_same_bits(snapshot(resumed), snapshot(engine))


class FaultyError(Exception):
    pass


@ranks(2)
@in_turn("place", ["forward", "loss"])
@in_turn("precision", ["fp32", "bf16"])
def test_abandoned_step_leaves_no_state(precision: str, place: str) -> None:
    def faulty_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        total, weight = loss(model, batch)
        if place == "loss" and batch.factor == 2:
            raise FaultyError
        return total, weight

    def stumble(module: nn.Module, args: Any) -> None:
        if stumbling:
            raise FaultyError

    stumbling = False
    engine = make_engine(policy=precision, strategy="fsdp")
    replace_loss(engine, faulty_loss)
    engine.module.blocks[1].register_forward_pre_hook(stumble)
    reference = make_engine(policy=precision, strategy="fsdp")
    for one in (engine, reference):
        train(one, 2, TWO_RANKS)
    batch = Batch(torch.ones(3, 6), torch.zeros(3, dtype=torch.int64))
    stumbling = place == "forward"
    with pytest.raises(FaultyError):
        engine.step([batch._replace(factor=float("inf")), batch._replace(factor=2.0)])
    stumbling = False
    for one in (engine, reference):
        train(one, 2, TWO_RANKS, first=2)
    assert_same_bits(trained(snapshot(engine)), trained(snapshot(reference)))


@ranks(2)
def test_evaluation_between_steps_changes_nothing() -> None:
    engine, reference = (make_engine(strategy="fsdp", policy="bf16") for _ in range(2))
    batch = Batch(torch.ones(3, 6), torch.zeros(3, dtype=torch.int64))
    for step in range(3):
        train(engine, 1, TWO_RANKS, first=step)
        mean = engine.evaluate([batch, batch])
        state = snapshot(engine)
        assert engine.evaluate([batch]) == pytest.approx(mean)
        assert_same_bits(snapshot(engine), state)
    train(reference, 3, TWO_RANKS)
    assert_same_bits(weights(engine), weights(reference))


@ranks(2)
def test_published_weights_replace_those_that_a_forward_has_gathered() -> None:
    engine, other = (make_engine(strategy="fsdp") for _ in range(2))
    batch = Batch(torch.ones(3, 6), torch.zeros(3, dtype=torch.int64))
    engine.module(batch.inputs)
    for each in (engine, other):
        for weight in each.weights().values():
            weight.mul_(2)
        each.publish_weights()
    assert engine.evaluate([batch]) == other.evaluate([batch])


@ranks(2)
def test_a_second_backward_through_freed_parameters_is_one_message() -> None:
    def with_penalty(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        inputs = batch.inputs.detach().requires_grad_()
        total, weight = loss(model, batch._replace(inputs=inputs))
        (slope,) = torch.autograd.grad(total, inputs, create_graph=True)
        return total + slope.square().sum(), weight

    engine = make_engine(strategy="fsdp", policy="fp32", first_step_checks=False)
    replace_loss(engine, with_penalty)
    with pytest.raises(ConfigError, match=r"gradient penalty .*torch\.func\.jvp"):
        train(engine, 1, TWO_RANKS)


@ranks(2)
def test_parameters_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'first\.weight' is float64"):
        make_engine(model=make_model().double(), strategy="fsdp")


@ranks(1)
def test_a_parameter_without_rows_is_named() -> None:
    model = nn.Module()
    model.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match=r"'temperature' has the shape \(\); .* shape \(1,\)"):
        build_strategy("fsdp", model, policy("fp32"), World.current("cpu"))
    model.temperature = nn.Parameter(torch.ones(3, 0))
    with pytest.raises(ConfigError, match=r"cannot shard 'temperature' of shape \(3, 0\), which"):
        build_strategy("fsdp", model, policy("fp32"), World.current("cpu"))


@ranks(1)
def test_embedding_with_sparse_gradients_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(ConfigError, match="model = '0': has sparse gradients"):
        build_strategy("fsdp", model, policy("fp32"), World.current("cpu"))


@ranks(2)
def test_parameters_that_are_not_contiguous_are_sharded() -> None:
    engines = []
    for contiguous in (True, False):
        model = make_model()
        if not contiguous:
            model.head.weight = nn.Parameter(model.head.weight.detach().t().contiguous().t())
        engines.append(make_engine(model=model, strategy="fsdp", policy="fp32"))
        train(engines[-1], 2, TWO_RANKS)
    assert_same_bits(*map(weights, engines))


def tied(first: str, second: str) -> nn.Module:
    """Return two blocks and two other layers, of which two share their weight."""
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model = nn.Sequential(OrderedDict(blocks=blocks, a=nn.Linear(4, 4), b=nn.Linear(4, 4)))
    model.get_submodule(second).weight = model.get_submodule(first).weight
    return model


@ranks(1)
def test_weights_that_blocks_share_are_named() -> None:
    message = r"strategy = 'fsdp': .*'{}\.weight' and '{}\.weight' are one parameter; use 'ddp'"
    for first, second in [("blocks.0", "blocks.1"), ("blocks.1", "b")]:
        with pytest.raises(ConfigError, match=message.format(first, second)):
            build_strategy("fsdp", tied(first, second), policy("fp32"), World.current("cpu"))
    build_strategy("fsdp", tied("a", "b"), policy("fp32"), World.current("cpu"))


@ranks(2)
def test_loss_that_evaluates_first_has_all_gradients() -> None:
    """Autocast's cache would give weights that were gathered before no gradient."""

    def evaluating(module: nn.Module, batch: Batch) -> Any:
        with torch.no_grad():
            loss(module, batch)
        return loss(module, batch)

    batches = [samples(seed, 4) for seed in range(2)]
    found = []
    for function in (loss, evaluating):
        options = {"policy": "bf16-autocast", "strategy": "fsdp"}
        engine = make_engine(loss=function, optimizer=fused_sgd, **options)
        engine.step(batches)
        found.append(weights(engine))
    assert_same_bits(*found)


@ranks(2)
def test_changes_that_fsdp_would_not_see_are_refused() -> None:
    hooked = make_model()
    hooked.head.weight.register_hook(torch.zeros_like)
    with pytest.raises(ConfigError, match=r"'head\.weight': has a hook"):
        Engine(hooked, loss, fused_sgd, strategy="fsdp", device="cpu")
    batches = microbatches(0, TWO_RANKS[0], dist.get_rank())
    engine = make_engine(strategy="fsdp")
    engine.step(batches)
    weight = engine.model.head.weight
    handle = weight.register_hook(torch.zeros_like)
    with pytest.raises(ConfigError, match=r"'head\.weight': has a hook"):
        engine.step(batches)
    handle.remove()
    engine.step(batches)
    weight.data = weight.data.clamp(-0.1, 0.1)
    with pytest.raises(ConfigError, match=r"'head\.weight': was replaced by \.data ="):
        engine.step(batches)


@ranks(2)
def test_a_functional_call_is_refused() -> None:
    def doubled(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        values = {name: 2 * parameter for name, parameter in model.named_parameters()}
        output = torch.func.functional_call(model, values, (batch.inputs,))
        return output.sum(), len(batch.inputs)

    engine = Engine(make_model(), doubled, fused_sgd, strategy="fsdp", device="cpu")
    with pytest.raises(ConfigError, match="is replaced by another tensor in forward"):
        engine.step(microbatches(0, TWO_RANKS[0], dist.get_rank()))


@ranks(2)
@in_turn("gathers", [False, True])
def test_a_penalty_on_the_shards_of_weights_is_refused(gathers: bool) -> None:
    def penalized(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        total, weight = loss(model, batch)
        squares = [parameter.square().sum() for parameter in model.blocks.parameters()]
        for square in squares:
            total = total + (square.full_tensor() if gathers else square)
        return total, weight

    engine = Engine(make_model(), penalized, fused_sgd, strategy="fsdp", device="cpu")
    message = (
        r"the loss uses a parameter outside of the module .*, a weight kept in FP32\); .* call"
    )
    with pytest.raises(ConfigError, match=message):
        engine.step(microbatches(0, TWO_RANKS[0], dist.get_rank()))


@ranks(2)
def test_an_evaluation_of_another_number_of_microbatches_is_refused() -> None:
    engine = make_engine(strategy="fsdp")
    batches = microbatches(0, TWO_RANKS[0], dist.get_rank())
    with pytest.raises(TrainingError, match=r"rank 0 .* rank 1 "):
        engine.evaluate(batches[:1] * (2 + dist.get_rank()))


@ranks(2)
@in_turn("strategy", ["ddp", "fsdp"])
def test_a_loss_function_that_calls_backward_is_refused(strategy: str) -> None:
    def calls_backward(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
        loss(model, batch)[0].backward()
        return loss(model, batch)

    engine = Engine(make_model(), calls_backward, fused_sgd, strategy=strategy, device="cpu")
    with pytest.raises(TrainingError, match="the loss function has called backward"):
        engine.step(microbatches(0, TWO_RANKS[0], dist.get_rank()))


@ranks(2)
def test_a_parameter_in_the_memory_of_another_tensor_is_refused() -> None:
    def same_parameter(model: nn.Sequential, weight: Tensor) -> str:
        model[1].weight.data = weight
        return "1.weight"

    def view_in_buffer(model: nn.Sequential, weight: Tensor) -> str:
        model[1].register_buffer("head", weight.t(), persistent=False)
        return "1.head"

    def row_in_attribute(model: nn.Sequential, weight: Tensor) -> str:
        model.row = weight[2]
        return "row"

    for options in ({"strategy": "fsdp"}, {"policy": "bf16"}, {"shard_optimizer": True}):
        for share in (same_parameter, view_in_buffer, row_in_attribute):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            other = share(model, model[0].weight.data)
            with pytest.raises(ConfigError, match=rf"weight' and '{other}', which share memory"):
                make_engine(model=model, **options)


@ranks(2)
def test_parts_of_one_allocation_are_no_shared_memory() -> None:
    whole = torch.ones(20)
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.data = whole[:16].view(4, 4)
    model[0].bias.data = whole[16:]
    make_engine(model=copy.deepcopy(model), strategy="fsdp")
    # Memory that reaches further than that of the tensor before.
    model[0].register_buffer("middle", whole[5:6])
    model[0].weight = None
    model[0].register_buffer("all", whole)
    with pytest.raises(ConfigError, match=r"'0\.all' and '0\.bias', which share memory"):
        make_engine(model=model, strategy="fsdp")
