from __future__ import annotations

import contextlib
import copy
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from benchmarks.growth import peak_allocated
from benchmarks.traffic import Traffic
from distmp.buckets import FlatParameters, Fp32GradBuckets, gradients
from distmp.buckets.used_parameters import weights_used_once
from distmp.errors import ConfigError, TrainingError
from tests.ranks import in_turn, ranks, run_ranks
from tests.recording import Collectives, Operators

WIDTH = 8
ONE_EACH = 1  # bytes: one bucket per parameter


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def accumulate(
    buckets: Fp32GradBuckets, backwards: Sequence[Callable[[], Tensor]]
) -> dict[str, Tensor]:
    """Run one step; return the accumulated gradients by name."""
    buckets.begin_step()
    for index, forward in enumerate(backwards):
        buckets.begin_microbatch(last=index == len(backwards) - 1)
        loss = forward()
        with buckets.backward_context(loss):
            loss.backward()
        buckets.end_microbatch()
    buckets.finish()
    return {name: gradient.clone() for name, gradient in buckets.gradients().items()}


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "SMALL_ELEMENTS", 0)


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


# Accumulation on one rank


@pytest.mark.parametrize("microbatches", [1, 8, 64, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accumulation_is_as_good_as_fp32(dtype: torch.dtype, microbatches: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    plain = copy.deepcopy(model)
    inputs = torch.randn(microbatches, 8, 16).to(dtype)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    found = accumulate(
        buckets, [lambda batch=batch: model(batch).float().square().sum() for batch in inputs]
    )
    expected = dict.fromkeys(found, torch.zeros((), dtype=torch.float64))
    for batch in inputs:
        parameters = dict(plain.named_parameters())
        gradients = torch.autograd.grad(
            plain(batch).float().square().sum(), list(parameters.values())
        )
        for name, gradient in zip(parameters, gradients, strict=True):
            expected[name] = expected[name] + gradient.double()
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-6


@pytest.mark.parametrize("earlier", [[], [1], [1, 64]])
def test_uses_of_one_weight_in_one_backward_sum_in_fp32(earlier: list[int]) -> None:
    """The number of uses in earlier microbatches has no effect."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 16, dtype=torch.bfloat16))
    inputs = torch.randn(64, 16, 16, dtype=torch.bfloat16)
    buckets = Fp32GradBuckets([("weight", weight)], None)

    def total(weights: Sequence[Tensor]) -> Tensor:
        products = [x @ w for x, w in zip(inputs, weights, strict=True)]
        return torch.stack([product.float().square().sum() for product in products]).sum()

    def zero(uses: int) -> Tensor:
        return sum_of_squares(sum(inputs[0] @ weight for _ in range(uses)) * 0)

    before = [partial(zero, uses) for uses in earlier]
    found = accumulate(buckets, [*before, lambda: total([weight] * 64)])["weight"]
    separate = [weight.detach().clone().requires_grad_() for _ in inputs]
    of_uses = torch.autograd.grad(total(separate), separate)
    expected = torch.stack([gradient.double() for gradient in of_uses]).sum(0)
    assert relative_error(found, expected) < 1e-6
    plain = weight.detach().clone().requires_grad_()
    low_precision = torch.autograd.grad(total([plain] * 64), plain)[0]
    assert relative_error(low_precision, expected) > 1e-3  # the error without buckets


def sum_of_squares(output: Tensor) -> Tensor:
    return output.float().square().sum()


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.usefixtures("all_are_large")
def test_the_16_bit_gradient_of_one_use_is_added_without_an_fp32_copy(
    device: str, dtype: torch.dtype, uses: int
) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(7, 13, dtype=dtype, device=device))
    buckets = Fp32GradBuckets([("weight", weight)], None)
    expected = torch.zeros_like(weight, dtype=torch.float64)
    counted = []
    buckets.begin_step()
    for index in range(8):
        buckets.begin_microbatch(last=index == 7)
        aliases = [weight.detach().requires_grad_() for _ in range(uses)]
        inputs = torch.randn(uses, 3, 13, dtype=dtype, device=device)
        for gradient in torch.autograd.grad(sum_of_products(inputs, aliases), aliases):
            expected += gradient
        loss = sum_of_products(inputs, [weight] * uses)
        with Traffic(weight.numel()) as traffic, buckets.backward_context(loss):
            loss.backward()
        buckets.end_microbatch()
        counted.append(traffic.bytes / weight.numel())
    buckets.finish()
    assert weight.grad is not None
    assert relative_error(weight.grad, expected) < 1e-6
    converted = 6 * uses + 12 * (uses - 1)
    assert counted == ([6] + [10] * 7 if uses == 1 else [converted + 8] + [converted + 12] * 7)


@pytest.mark.parametrize(("held", "launches"), [(10**6, 1), (2 * 4 * WIDTH**2, 2), (0, 6)])
@pytest.mark.usefixtures("all_are_large")
def test_first_gradients_are_copied_in_few_launches(
    held: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gradients.HELD_BYTES, "cpu", held)
    torch.manual_seed(0)
    weights = {f"{i}": nn.Parameter(torch.randn(WIDTH, WIDTH)) for i in range(6)}
    buckets = Fp32GradBuckets(weights.items(), None)
    inputs = torch.randn(3, WIDTH, WIDTH)

    def loss(batch: Tensor) -> Tensor:
        return torch.stack([(batch @ weight).square().sum() for weight in weights.values()]).sum()

    with Operators() as operators:
        found = accumulate(buckets, [lambda batch=batch: loss(batch) for batch in inputs])
    assert operators.counts["aten::_foreach_copy_"] == launches
    expected = torch.autograd.grad(sum(map(loss, inputs)), [*weights.values()])
    for name, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(found[name], gradient)


def sum_of_products(inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    outputs = [linear(each, weight) for each, weight in zip(inputs, weights, strict=True)]
    return sum_of_squares(torch.stack(outputs))


class Recomputed(torch.autograd.Function):
    """Reentrant checkpointing as other libraries write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.x, ctx.function = x.detach().requires_grad_(), function
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            output = ctx.function(ctx.x)
        torch.autograd.backward(output, gradient)
        return ctx.x.grad, None


@pytest.mark.parametrize("own", [False, True])
def test_uses_that_reentrant_checkpointing_hides_sum_in_fp32(own: bool) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    buckets = Fp32GradBuckets([("weight", weight)], None)
    start = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)

    def use_often(x: Tensor) -> Tensor:
        for _ in range(300):
            x = x + weight
        return x

    def hidden() -> Tensor:
        if own:
            return Recomputed.apply(start, use_often)
        return checkpoint(use_often, start, use_reentrant=True)

    found = accumulate(buckets, [lambda: (hidden() + weight).float().sum()] * 2)["weight"]
    assert torch.equal(found, torch.full((3,), 602.0))


def test_sparse_16_bit_gradients_sum_in_fp32() -> None:
    table = nn.Embedding(2, 3, sparse=True, dtype=torch.bfloat16)
    buckets = Fp32GradBuckets([("weight", table.weight)], None)
    tokens = torch.zeros(300, dtype=torch.int64)
    found = accumulate(buckets, [lambda: table(tokens).float().sum()] * 2)["weight"]
    assert torch.equal(found, torch.tensor([[600.0] * 3, [0.0] * 3]))


@pytest.mark.parametrize("post_accumulate", [False, True])
def test_hooks_of_the_user_see_fp32_gradients(post_accumulate: bool) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    seen: list[torch.dtype] = []
    if post_accumulate:
        weight.register_post_accumulate_grad_hook(lambda _: seen.append(weight.grad.dtype))
    else:
        weight.register_hook(lambda gradient: seen.append(gradient.dtype))
    buckets = Fp32GradBuckets([("weight", weight)], None)
    accumulate(buckets, [weight.sum] * 2)
    assert seen == [torch.float32] * 2


def _plain(_: Any, gradient: Tensor) -> Tensor:
    return gradient


def _enables(_: Any, gradient: Tensor) -> Tensor:
    with torch.enable_grad():
        return gradient


def _sets(_: Any, gradient: Tensor) -> Tensor:
    with torch.set_grad_enabled(True):
        return gradient


@pytest.mark.parametrize(
    ("name", "backward", "is_searched"),
    [
        ("backward", _plain, True),
        ("vjp", _plain, True),
        ("backward", once_differentiable(_plain), True),
        ("backward", _enables, False),
        ("backward", _sets, False),
        ("vjp", _enables, False),
        ("backward", once_differentiable(_enables), False),
        ("backward", partial(_plain), False),  # has no code to read
    ],
)
def test_a_graph_that_a_function_may_hide_is_not_searched(
    name: str, backward: Callable[..., Tensor], is_searched: bool
) -> None:
    methods = {"forward": staticmethod(lambda _, x: x.view_as(x)), name: staticmethod(backward)}
    function: Any = type("Function", (torch.autograd.Function,), methods)
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    loss = (function.apply(2 * weight) * other * other).sum()
    assert weights_used_once(loss) == ({id(weight)} if is_searched else set())


class NoGradient(torch.autograd.Function):
    """Uses a weight and returns no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def test_an_autograd_function_may_return_no_gradient_for_a_weight() -> None:
    used, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    buckets = Fp32GradBuckets([("used", used), ("other", other)], None)
    found = accumulate(buckets, [lambda: NoGradient.apply(used, other).sum()] * 2)
    assert torch.equal(found["used"], torch.full((3,), 2.0))
    assert other.grad is None


def test_tied_weights_are_one_parameter() -> None:
    model = Tied()
    plain = copy.deepcopy(model)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    batch = torch.randn(5, WIDTH)
    found = accumulate(buckets, [lambda: model(batch).square().sum()] * 3)
    plain(batch).square().sum().backward()
    assert sorted(found) == ["bias", "first.weight"]
    assert plain.first.weight.grad is not None
    torch.testing.assert_close(found["first.weight"], 3 * plain.first.weight.grad)


def _reparametrize(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


def _replace_head(model: nn.Sequential) -> None:
    model[1] = nn.Linear(WIDTH, WIDTH)


def _assign(model: nn.Module) -> None:
    model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)


@pytest.mark.parametrize(
    ("change", "steps", "name"),
    [(_reparametrize, 0, "0.weight"), (_replace_head, 0, "1.bias"), (_assign, 2, "1.bias")],
)
def test_parameters_that_replace_those_of_the_buckets_are_refused(
    change: Callable[[nn.Module], None], steps: int, name: str
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    for _ in range(steps):
        accumulate(buckets, [partial(sum_of_outputs, model)] * 2)
    change(model)
    with pytest.raises(ConfigError, match=f"= '{name}': is not used by the loss, which uses one"):
        accumulate(buckets, [partial(sum_of_outputs, model)] * 2)


def test_other_trainable_parameters_may_take_part_in_the_loss() -> None:
    model, critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    accumulate(buckets, [lambda: critic(model(torch.ones(WIDTH))).sum()])
    model.requires_grad_(False)
    other = Fp32GradBuckets(critic.named_parameters(), None)
    accumulate(other, [lambda: critic(model(torch.ones(WIDTH))).sum()])


def test_parameters_may_be_unused_beside_other_trainable_ones() -> None:
    model, critic = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]), nn.Linear(WIDTH, 1)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    model[0].requires_grad_(False)
    accumulate(buckets, [lambda: critic(model[1](torch.ones(WIDTH))).sum()] * 2)
    accumulate(buckets, [lambda: critic(torch.ones(WIDTH)).sum()])


def test_parameters_may_be_used_in_reentrant_checkpoints() -> None:
    model, critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    inputs = torch.ones(WIDTH, requires_grad=True)
    accumulate(buckets, [lambda: critic(checkpoint(model, inputs, use_reentrant=True)).sum()] * 2)


@pytest.mark.parametrize("small", [0, WIDTH**2])
def test_step_starts_with_zero_gradients(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(gradients, "SMALL_ELEMENTS", small)
    model = nn.Linear(WIDTH, WIDTH)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    batch = torch.randn(5, WIDTH)
    expected = accumulate(buckets, [lambda: model(batch).sum()])
    for spoil in (
        lambda: model.zero_grad(set_to_none=True),
        lambda: model.zero_grad(set_to_none=False),
        lambda: (model(batch).sum() * float("nan")).backward(),
    ):
        buckets.begin_step()
        buckets.begin_microbatch(last=False)
        spoil()
        found = accumulate(buckets, [lambda: model(batch).sum()])
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("small", [0, WIDTH, WIDTH**2])
def test_autograd_adds_to_the_bucket_but_a_large_gradient_is_copied_first(
    monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(gradients, "SMALL_ELEMENTS", small)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    plain = copy.deepcopy(model)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    batch = torch.randn(5, WIDTH)
    model(batch).sum().backward()
    buckets.begin_step()
    counts: dict[int, Counter[str]] = {}
    for index in range(3):
        buckets.begin_microbatch(last=index == 2)
        with buckets.backward_context():
            counts[index] = operators(lambda: model(batch).square().sum().backward())
        buckets.end_microbatch()
    for _ in range(2):
        in_plain_torch = operators(lambda: plain(batch).square().sum().backward())
    assert counts[1] == in_plain_torch
    copied = sum(parameter.numel() > small for parameter in model.parameters())
    assert counts[0]["aten::_foreach_copy_"] == copied
    assert counts[0]["aten::add_"] == counts[1]["aten::add_"] - copied


def halve(weight: Tensor) -> None:
    if weight.grad is not None:
        weight.grad.mul_(0.5)


def replace_by_half(weight: Tensor) -> None:
    if weight.grad is not None:
        weight.grad = weight.grad * 0.5


@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("change", [halve, replace_by_half])
def test_another_hook_changes_the_gradient_of_each_microbatch_once(
    change: Callable[[Tensor], None], registered: str
) -> None:
    weight = nn.Parameter(torch.zeros(3))
    if registered == "before":
        weight.register_post_accumulate_grad_hook(change)
    buckets = Fp32GradBuckets([("weight", weight)], None)
    if registered == "after":
        weight.register_post_accumulate_grad_hook(change)
    for _ in range(2):
        found = accumulate(buckets, [weight.sum] * 4)["weight"]
        assert torch.equal(found, torch.full((3,), 2.0))


@ranks(2)
def test_gradients_of_ddp_are_refused() -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    buckets = Fp32GradBuckets(wrapped.named_parameters(), group())
    with pytest.raises(TrainingError, match=r"DistributedDataParallel.*leave the module unwrapped"):
        accumulate(buckets, [partial(sum_of_outputs, wrapped)])


def set_to_one(weight: Tensor) -> None:
    weight.grad = torch.ones_like(weight)


@pytest.mark.parametrize("change", [replace_by_half, set_to_one])
@pytest.mark.parametrize("microbatches", [2, 3])
def test_a_backward_that_replaces_the_sum_of_earlier_microbatches_is_refused(
    microbatches: int, change: Callable[[Tensor], None]
) -> None:
    weight = nn.Parameter(torch.zeros(3))
    buckets = Fp32GradBuckets([("weight", weight)], None)

    def change_in_backward() -> Tensor:
        product = weight * 1.0
        product.register_hook(lambda _: change(weight))
        return product.sum()

    forwards = [weight.sum] * (microbatches - 1)
    with pytest.raises(TrainingError, match=r"'weight'\.grad was set in a step by other code"):
        accumulate(buckets, [*forwards, change_in_backward])
    with pytest.raises(TrainingError, match=r"'weight'\.grad was set in a step by other code"):
        accumulate(buckets, [change_in_backward, change_in_backward])
    assert accumulate(buckets, [weight.sum])["weight"].tolist() == [1, 1, 1]


@ranks(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_forward_that_sets_a_gradient_is_refused(microbatches: int) -> None:
    weight = nn.Parameter(torch.zeros(3))
    buckets = Fp32GradBuckets([("weight", weight)], group())

    def set_and_run() -> Tensor:
        set_to_one(weight)
        return weight.sum()

    with pytest.raises(TrainingError, match=r"'weight'\.grad was set in a step by other code"):
        accumulate(buckets, [weight.sum] * (microbatches - 1) + [set_and_run])


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: torch.optim.SGD([weight]).zero_grad(set_to_none=True),
        lambda weight: torch.optim.SGD([weight]).zero_grad(set_to_none=False),
        lambda weight: nn.utils.clip_grad_norm_([weight], 0.1),
        halve,
        replace_by_half,
    ],
)
def test_a_forward_cannot_change_the_sum_of_earlier_microbatches(
    change: Callable[[Tensor], object],
) -> None:
    weight = nn.Parameter(torch.zeros(3))
    buckets = Fp32GradBuckets([("weight", weight)], None)

    def change_and_run() -> Tensor:
        change(weight)
        return weight.sum()

    found = accumulate(buckets, [change_and_run] * 4)["weight"]
    assert torch.equal(found, torch.full((3,), 4.0))


def test_gradients_that_are_not_reduced_do_not_stay_after_a_backward() -> None:
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    buckets = Fp32GradBuckets([(str(i), weight) for i, weight in enumerate(weights)], None)
    buckets.begin_step()
    for last in (False, False, True):
        buckets.begin_microbatch(last=last)
        with buckets.backward_context():
            (weights[0] if last else sum(weights)).sum().backward()  # type: ignore[union-attr]
        assert [weight.grad for weight in weights] == [None, None]
        buckets.end_microbatch()
    buckets.finish()
    assert [weight.grad[0] for weight in weights if weight.grad is not None] == [3.0, 2.0]


def test_gradients_that_are_not_reduced_do_not_stay_after_an_error() -> None:
    weight = nn.Parameter(torch.zeros(3))
    buckets = Fp32GradBuckets([("weight", weight)], None)
    buckets.begin_step()
    buckets.begin_microbatch(last=False)
    with buckets.backward_context():
        weight.sum().backward()
    buckets.end_microbatch()
    buckets.begin_microbatch(last=False)
    with pytest.raises(ValueError, match="out of memory"), buckets.backward_context():
        raise ValueError("out of memory")
    assert weight.grad is None


def test_backward_outside_of_the_context_is_equal() -> None:
    weight = nn.Parameter(torch.zeros(3))
    buckets = Fp32GradBuckets([("weight", weight)], None)
    buckets.begin_step()
    for index in range(4):
        buckets.begin_microbatch(last=index == 3)
        with buckets.backward_context() if index % 2 else contextlib.nullcontext():
            weight.sum().backward()
        buckets.end_microbatch()
    buckets.finish()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3,), 4.0))


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backward_that_builds_a_graph_is_refused(dtype: torch.dtype, before: int) -> None:
    model = nn.Linear(WIDTH, WIDTH, dtype=dtype)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    batch = torch.randn(5, WIDTH, dtype=dtype)
    buckets.begin_step()
    for _ in range(before):
        buckets.begin_microbatch(last=False)
        model(batch).sum().backward()
        buckets.end_microbatch()
    buckets.begin_microbatch(last=False)
    refused = pytest.raises(TrainingError, match=r"create_graph=True.*of 'bias'.*torch.autograd")
    loss = model(batch).sum()
    with refused, buckets.backward_context(loss):
        loss.backward(create_graph=True)
    assert model.bias.grad is None


def operators(run: Callable[[], None]) -> Counter[str]:
    with Operators() as found:
        run()
    return found.counts


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x) + self.bias))


# Reduction over ranks


class Branches(nn.Module):
    """Six weights; a forward uses some of them, in any order, possibly several times."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(2)
        weights = torch.randn(6, WIDTH, WIDTH) / WIDTH**0.5
        self.weights = nn.ParameterList(weight.to(dtype) for weight in weights)

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        for index in used:
            x = torch.tanh(x @ self.weights[index])
        return x.float().square().sum()


Usage = list[list[list[int]]]
"""Indices of the weights used, by rank and microbatch."""


def random_usage(generator: random.Random, world_size: int) -> Usage:
    microbatches = generator.randint(1, 3)
    return [
        [generator.choices(range(6), k=generator.randint(1, 7)) for _ in range(microbatches)]
        for _ in range(world_size)
    ]


def check_usage(model: Branches, buckets: Fp32GradBuckets, usage: Usage) -> None:
    plain = Branches().double()
    for other, of_rank in enumerate(usage):
        for index, used in enumerate(of_rank):
            plain(inputs_of(other, index).double(), used).backward()
    rank = dist.get_rank()
    with Collectives() as collectives:
        found = accumulate(
            buckets,
            [
                lambda index=index, used=used: model(inputs_of(rank, index), used)
                for index, used in enumerate(usage[rank])
            ],
        )
    for name, parameter in plain.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-5)
    places = [buffer.data_ptr() for buffer in buckets.buffers]
    reduced = [place for place in collectives.addresses("allreduce_") if place in places]
    assert sorted(reduced) == sorted(places)
    orders: list[list[int]] = [[], []]
    dist.all_gather_object(orders, [places.index(place) for place in reduced])
    assert orders[0] == orders[1]


def inputs_of(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return torch.randn(3, WIDTH, generator=generator)


@ranks(2)
@in_turn("bucket_bytes", [ONE_EACH, 2 * 4 * WIDTH**2, 10**6])
def test_ranks_that_use_different_weights(bucket_bytes: int) -> None:
    model = Branches()
    buckets = Fp32GradBuckets(model.named_parameters(), group(), bucket_bytes)
    check_usage(model, buckets, [[[0, 1, 2], [2, 4]], [[0], [4, 3, 3, 1]]])
    generator = random.Random(bucket_bytes)
    for _ in range(25):
        check_usage(model, buckets, random_usage(generator, dist.get_world_size()))


@ranks(2)
def test_reduction_starts_during_backward() -> None:
    model = Branches()
    buckets = Fp32GradBuckets(model.named_parameters(), group(), ONE_EACH)
    launched_at_the_first_weight: list[int] = []
    model.weights[0].register_hook(
        lambda gradient: launched_at_the_first_weight.append(len(collectives.found))
    )
    with Collectives() as collectives:
        accumulate(buckets, [lambda: model(inputs_of(0, 0), range(6))] * 2)
    assert launched_at_the_first_weight == [0, 5]


class Backwards(nn.Module):
    """Registers its layers in the order in which gradients arrive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x.square().sum()


@ranks(2)
def test_the_second_step_reduces_in_the_order_that_rank_0_observed() -> None:
    model = Backwards()
    buckets = Fp32GradBuckets(model.named_parameters(), group(), ONE_EACH)
    launched_at_the_last_gradient: list[int] = []
    model.layers[-1].weight.register_hook(
        lambda gradient: launched_at_the_last_gradient.append(len(collectives.found))
    )
    for _ in range(2):
        with Collectives() as collectives:
            accumulate(buckets, [lambda: model(inputs_of(dist.get_rank(), 0))])
    assert launched_at_the_last_gradient == [0, 5]


@ranks(2)
def test_low_precision_parameters_are_reduced_in_fp32() -> None:
    model = Branches(torch.bfloat16)
    buckets = Fp32GradBuckets(model.named_parameters(), group())
    factor = torch.tensor([1.0, 2.0**-12])[dist.get_rank()]
    ones = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    found = accumulate(buckets, [lambda: (ones @ model.weights[5]).float().sum() * factor])
    assert torch.equal(found["weights.5"], torch.full((WIDTH, WIDTH), 1 + 2.0**-12))


@ranks(4)
def test_a_plain_all_reduce_sends_no_padding_for_the_shards_of_ranks() -> None:
    named = [*nn.Linear(WIDTH, 4, bias=False).named_parameters()]
    sizes = {
        (shard, reduce_dtype): Fp32GradBuckets(
            named, group(), shard=shard, reduce_dtype=reduce_dtype
        )
        .buffers[0]
        .numel()
        for shard in (False, True)
        for reduce_dtype in (torch.float32, torch.bfloat16)
    }
    assert sizes.pop((False, torch.float32)) == 32
    assert set(sizes.values()) == {128}, "32 of each rank"


@ranks(2)
def test_tied_and_frozen_parameters_over_ranks() -> None:
    model = Tied()
    model.bias.requires_grad_(False)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    buckets = Fp32GradBuckets(trainable, group(), ONE_EACH)
    found = accumulate(
        buckets, [lambda i=i: model(inputs_of(dist.get_rank(), i)).square().sum() for i in range(2)]
    )
    plain = Tied().double()
    for rank in range(2):
        for index in range(2):
            plain(inputs_of(rank, index).double()).square().sum().backward()
    assert list(found) == ["first.weight"]
    torch.testing.assert_close(
        found["first.weight"].double(), plain.first.weight.grad, rtol=1e-5, atol=1e-6
    )


LEAVES = (3, 5, 1, 7, 8, 0, 2, 2)
"""Number of samples of each microbatch of the global batch."""


def gradient_of_the_global_mean(dtype: torch.dtype) -> dict[str, Tensor]:
    """Distribute the global batch over the ranks; return the mean gradient in FP64."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = Branches(dtype)
    buckets = Fp32GradBuckets(model.named_parameters(), dist.group.WORLD, ONE_EACH)
    each = len(LEAVES) // world_size
    local = range(rank * each, (rank + 1) * each)
    found = accumulate(buckets, [lambda i=i: model(leaf(i).to(dtype), range(6)) for i in local])
    return {name: value.double() / sum(LEAVES) for name, value in found.items()}


def leaf(index: int) -> Tensor:
    return inputs_of(7, index).repeat(3, 1)[: LEAVES[index]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_does_not_depend_on_how_samples_are_spread(dtype: torch.dtype) -> None:
    expected = gradient_of_the_global_mean(dtype)
    if dtype == torch.float32:
        plain = Branches().double()
        plain(torch.cat([leaf(i) for i in range(8)]).double(), range(6)).backward()
        for name, parameter in plain.named_parameters():
            assert relative_error(expected[name], parameter.grad / sum(LEAVES)) < 1e-6
    for world_size in (2, 4, 8):
        for found in run_ranks(gradient_of_the_global_mean, world_size, dtype):
            for name, value in expected.items():
                assert relative_error(found[name], value) < 1e-6


# Activation checkpointing


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first if shared else nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.first, self.second):
            x = checkpoint(self.segment, part, x, use_reentrant=self.reentrant)
        return x.square().sum()

    def segment(self, part: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(part(x))


def checkpointed_step(model: Checkpointed, buckets: Fp32GradBuckets) -> dict[str, Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return accumulate(
        buckets, [lambda i=i: model(inputs_of(rank, i).requires_grad_()) for i in range(2)]
    )


def checkpointed_reference(world_size: int, *, shared: bool) -> dict[str, Any]:
    plain = Checkpointed(reentrant=False, shared=shared).double()
    for rank in range(world_size):
        for index in range(2):
            x = inputs_of(rank, index).double()
            for part in (plain.first, plain.second):
                x = torch.tanh(part(x))
            x.square().sum().backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name].double(), expected[name], rtol=1e-5, atol=1e-6)


@ranks(2)
@in_turn("bucket_bytes", [ONE_EACH, 10**6])
def test_checkpointing(bucket_bytes: int) -> None:
    for reentrant, shared in ((False, False), (False, True), (True, False)):
        model = Checkpointed(reentrant=reentrant, shared=shared)
        buckets = Fp32GradBuckets(model.named_parameters(), group(), bucket_bytes)
        for _ in range(2):
            found = checkpointed_step(model, buckets)
            assert_gradients(found, checkpointed_reference(2, shared=shared))


@ranks(2)
def test_reentrant_checkpointing_of_a_shared_weight_is_refused() -> None:
    model = Checkpointed(reentrant=True, shared=True)
    buckets = Fp32GradBuckets(model.named_parameters(), group(), ONE_EACH)
    with pytest.raises(
        TrainingError, match=r"'first\.(weight|bias)' arrived a second time .*=False"
    ):
        checkpointed_step(model, buckets)
    model.reentrant = False
    assert_gradients(checkpointed_step(model, buckets), checkpointed_reference(2, shared=True))


def test_reentrant_checkpointing_of_a_shared_weight_alone() -> None:
    model = Checkpointed(reentrant=True, shared=True)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    assert_gradients(checkpointed_step(model, buckets), checkpointed_reference(1, shared=True))


# Steps that end early


@ranks(2)
def test_a_step_abandoned_after_buckets_were_launched() -> None:
    model = Branches()
    buckets = Fp32GradBuckets(model.named_parameters(), group(), ONE_EACH)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    # One rank launches more buckets than the other, which has to run the missing reductions.
    hook = model.weights[[1, 4][dist.get_rank()]].register_hook(fail)
    with pytest.raises(ArithmeticError):
        accumulate(buckets, [lambda: model(inputs_of(0, 0), range(6))])
    hook.remove()
    buckets.discard()
    check_usage(model, buckets, [[[0, 1, 2], [2, 4]], [[0], [4, 3, 3, 1]]])


def test_a_microbatch_cannot_be_dropped_from_a_sum_with_earlier_ones() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    buckets.begin_step()
    buckets.begin_microbatch(last=True)
    sum_of_outputs(model).backward()
    with pytest.raises(TrainingError, match=r"needs .*drop_non_finite=True"):
        buckets.end_microbatch(torch.tensor(False))


@pytest.mark.parametrize("options", [{}, {"reproducible": True}, {"drop_non_finite": True}])
def test_a_microbatch_that_did_not_end_is_refused(options: dict[str, bool]) -> None:
    weight = nn.Parameter(torch.zeros(3))
    buckets = Fp32GradBuckets([("weight", weight)], None, **options)  # type: ignore[arg-type]
    buckets.begin_step()
    buckets.begin_microbatch(last=False)
    with contextlib.suppress(MemoryError), buckets.backward_context():
        weight.sum().backward()
        raise MemoryError
    for last in (False, True):  # a retry would add the same gradient once more
        with pytest.raises(TrainingError, match=r"without end_microbatch\(\); call begin_step"):
            buckets.begin_microbatch(last=last)
    assert accumulate(buckets, [weight.sum, weight.sum])["weight"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("options", [{}, {"reproducible": True}, {"drop_non_finite": True}])
def test_a_backward_between_microbatches_is_refused(options: dict[str, bool]) -> None:
    weight = nn.Parameter(torch.zeros(3))
    buckets = Fp32GradBuckets([("weight", weight)], None, **options)  # type: ignore[arg-type]
    buckets.begin_step()
    buckets.begin_microbatch(last=False)
    weight.sum().backward()
    buckets.end_microbatch()
    weight.sum().backward()
    buckets.begin_microbatch(last=True)
    with pytest.raises(TrainingError, match=r"backward between microbatches"):
        buckets.finish()


@ranks(2)
def test_shards_that_no_optimizer_gets_are_refused() -> None:
    """A parameter is larger than the shard that this rank has of its gradient."""
    weight = nn.Parameter(torch.zeros(3))
    buckets = Fp32GradBuckets([("weight", weight)], group(), shard=True)
    with pytest.raises(ConfigError, match=r"shard = True: .*'weight'.*FlatParameters"):
        accumulate(buckets, [weight.sum])


@ranks(2)
def test_a_backward_outside_of_a_step_reduces_nothing() -> None:
    model = Branches()
    buckets = Fp32GradBuckets(model.named_parameters(), group(), ONE_EACH)
    accumulate(buckets, [lambda: model(inputs_of(0, 0), range(6))])
    with Collectives() as collectives:
        model(inputs_of(0, 0), range(6)).backward()
    assert collectives.found == []


def sum_of_outputs(model: nn.Module) -> Tensor:
    return model(torch.randn(5, WIDTH)).sum()


def test_buckets_and_model_are_freed_together() -> None:
    model = nn.Linear(WIDTH, WIDTH)
    buckets = Fp32GradBuckets(model.named_parameters(), None)
    accumulate(buckets, [partial(sum_of_outputs, model)])
    alive = [weakref.ref(model.weight), weakref.ref(buckets)]
    del model, buckets
    gc.collect()
    assert [one() for one in alive] == [None, None]


# Memory


@ranks(2)
def test_a_sharded_sum_holds_no_second_set_of_buckets() -> None:
    """Received shards are summed and freed while later buckets are in flight."""
    elements, parameters = 2**16, 16
    named = [(str(n), nn.Parameter(torch.ones(elements))) for n in range(parameters)]
    buckets = Fp32GradBuckets(named, group(), ONE_EACH, shard=True)
    FlatParameters(buckets, {name: parameter.detach().clone() for name, parameter in named})

    def step() -> None:
        buckets.begin_step()
        buckets.begin_microbatch(last=True)
        sum(parameter.square().sum() for _, parameter in named).backward()
        buckets.end_microbatch()
        buckets.finish()

    # The receive buffers of two buckets and intermediate gradients of backward. The limit is
    # higher, because frees by gloo's threads are not counted.
    assert peak_allocated(step) < parameters / 2 * 4 * elements


class SometimesUsed(nn.Module):
    """Three layers, of which rank 1 does not use the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            if (index, rank) != (1, 1):
                x = torch.tanh(layer(x))
        return x.square().sum()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ranks(2, cuda=True)
def test_gradients_of_two_gpus_are_summed_while_backward_continues(dtype: torch.dtype) -> None:
    # In a step of one microbatch, gradients are copied to their bucket right before it is reduced.
    # Reductions start in the order of the first step, and memory of a step is used again.
    counts, rank = (2, 1, 2), dist.get_rank()
    model = SometimesUsed().cuda()
    buckets = Fp32GradBuckets(
        model.named_parameters(), group(), bucket_bytes=ONE_EACH, reduce_dtype=dtype
    )
    given = [inputs_of(rank, microbatch).cuda() for microbatch in range(2)]
    forwards = [partial(model, inputs, rank) for inputs in given]
    steps = [accumulate(buckets, forwards[:count]) for count in counts]
    for count, found in zip(counts, steps, strict=True):
        expected = SometimesUsed()
        for microbatch in range(count):
            for member in range(2):
                expected(inputs_of(member, microbatch), member).backward()
        for name, parameter in expected.named_parameters():
            assert parameter.grad is not None
            error = relative_error(found[name].cpu(), parameter.grad)
            assert error < (1e-5 if dtype == torch.float32 else 2e-2), name
