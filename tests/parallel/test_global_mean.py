"""The gradient of `global_mean` against a float64 mean over all tokens, under every wrapper."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import distmp
from distmp.errors import ConfigError
from tests.marks import nightly
from tests.ranks import ranks, run_ranks
from tests.recording import no_waiting

VARIANT_SPLITS = 10
VOCABULARY, WIDTH, LENGTH = 11, 8, 6


class Attention(nn.Module):
    """Causal attention with four heads; with a group, over sequences that its ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.context: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            layer(x).unflatten(-1, (-1, 2)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        query, key, value = heads
        first = 0
        if self.context is not None:
            first = dist.get_rank(self.context) * x.shape[1]
            key, value = (all_gather_tensor_autograd(t, 2, self.context) for t in (key, value))
        positions = torch.arange(first, first + x.shape[1])
        mask = positions[:, None] >= torch.arange(key.shape[2])
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = Attention()
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.logits(self.norm(hidden + self.attention(hidden)))


class Microbatch(NamedTuple):
    tokens: Tensor
    labels: Tensor  # -100 is not counted

    @property
    def weight(self) -> Tensor:
        return (self.labels != -100).sum()

    def part(self, index: int, parts: int) -> Microbatch:
        """Return one part of each sequence."""
        return Microbatch(*(t.chunk(parts, 1)[index] for t in self))


def loss_sum(model: nn.Module, batch: Microbatch) -> Tensor:
    logits = model(batch.tokens).flatten(0, 1)
    return F.cross_entropy(logits, batch.labels.flatten(), ignore_index=-100, reduction="sum")


def split(seed: int, data_ranks: int) -> list[list[Microbatch]]:
    """Return the microbatches of each data-parallel rank; up to all of a rank may be masked."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 3, (), generator=generator))
    step = []
    for _ in range(data_ranks):
        kept = torch.rand((), generator=generator) * torch.randint(0, 2, (), generator=generator)
        step.append([])
        for _ in range(count):
            shape = (int(torch.randint(1, 4, (), generator=generator)), LENGTH)
            tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
            labels = torch.randint(0, VOCABULARY, shape, generator=generator)
            masked = torch.rand(shape, generator=generator) > kept
            step[-1].append(Microbatch(tokens, labels.masked_fill(masked, -100)))
    return step


def reference(model: nn.Module, step: list[list[Microbatch]]) -> tuple[float, list[Tensor]]:
    """Return loss and gradients of the mean over all tokens, in float64 on one rank."""
    model.zero_grad()
    batches = [batch for rank in step for batch in rank]
    total = sum(loss_sum(model, batch) for batch in batches)
    mean = total / max(1, sum(int(batch.weight) for batch in batches))
    mean.backward()
    return mean.item(), [p.grad.clone() for p in model.parameters()]


class Wrapped(NamedTuple):
    """A wrapped model, and how this rank trains it."""

    model: nn.Module
    data_rank: int  # which of the data-parallel ranks
    data_ranks: int
    arguments: Mapping[str, Any] = MappingProxyType({})  # of global_mean
    part: tuple[int, int] = (0, 1)  # index and number of the part of each sequence
    reduce: Callable[[], None] = lambda: None  # what the loop does after the last backward
    layouts: Sequence[Any] = ()  # mesh and placements of each parameter, where DDP hides them


@contextlib.contextmanager
def unsynchronized(model: nn.Module, last: bool) -> Iterator[None]:
    """Reduce gradients after the last microbatch only, where the wrapper can."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    if hasattr(model, "no_sync") and not last:
        with model.no_sync():
            yield
    else:
        yield


def gradients(wrapped: Wrapped, parameters: list[nn.Parameter]) -> list[Tensor]:
    fsdp1 = FullyShardedDataParallel
    if isinstance(wrapped.model, fsdp1):
        with fsdp1.summon_full_params(wrapped.model, writeback=False, with_grads=True):
            return [p.grad.clone() for p in wrapped.model.parameters()]
    local: Any = [p.grad for p in parameters]
    for index, layout in enumerate(wrapped.layouts):
        if layout is not None:
            local[index] = DTensor.from_local(local[index], *layout)
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in local]


def train(
    wrapped: Wrapped, parameters: list[nn.Parameter], step: list[list[Microbatch]]
) -> tuple[float, list[Tensor]]:
    """Return loss and gradients of a step."""
    for parameter in parameters:
        parameter.grad = None
    own = [batch.part(*wrapped.part) for batch in step[wrapped.data_rank]]
    weight = torch.stack([batch.weight for batch in own]).sum()
    value = 0.0
    for index, batch in enumerate(own):
        with unsynchronized(wrapped.model, last=index == len(own) - 1):
            total = loss_sum(wrapped.model, batch)
            arguments = {"microbatches": len(own), **wrapped.arguments}
            loss = distmp.global_mean(total, weight, wrapped.model, **arguments)
            loss.backward()
        value += loss.item()
    wrapped.reduce()
    return value, gradients(wrapped, parameters)


def relative_error(values: list[Tensor], expected: list[Tensor]) -> float:
    values, expected = (
        torch.cat([t.double().flatten() for t in tensors]) for tensors in (values, expected)
    )
    return float((values - expected).norm() / expected.norm().clamp(min=1e-12))


def data_parallel(model: nn.Module, **arguments: Any) -> Wrapped:
    return Wrapped(model, dist.get_rank(), dist.get_world_size(), arguments)


def divided(model: Any, factor: float, mesh: DeviceMesh | None = None) -> nn.Module:
    for part in (model.attention, model):
        fully_shard(part, mesh=mesh)
        # Gloo has no ReduceOp.PREMUL_SUM.
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(factor)
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: Any = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan["attention.output"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def summed(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def hooked(model: nn.Module, hook: Callable[..., Any]) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def context_parallel(model: Any, mesh: DeviceMesh) -> Wrapped:
    """Split sequences over one dimension; FSDP2 reduces over both, as in torchtitan."""
    model.attention.context = mesh["cp"].get_group()
    part = (mesh.get_local_rank("cp"), mesh["cp"].size())
    fully_shard(model, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    return Wrapped(model, mesh.get_local_rank("dp"), mesh["dp"].size(), part=part)


def ddp_of_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> Wrapped:
    parameters = tensor_parallel(model, mesh["tp"]).parameters()
    layouts = [
        (p.device_mesh, p.placements) if isinstance(p, DTensor) else None for p in parameters
    ]
    wrapped = DistributedDataParallel(model, device_mesh=mesh["dp"])
    return Wrapped(wrapped, mesh.get_local_rank("dp"), 2, layouts=layouts)


def own_reduction(model: nn.Module, mesh: DeviceMesh) -> Wrapped:
    def reduce() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    arguments = {"group": mesh, "divisor": 1}
    return Wrapped(model, dist.get_rank(), dist.get_world_size(), arguments, reduce=reduce)


def fsdp1(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    strategy = ShardingStrategy.HYBRID_SHARD if mesh else ShardingStrategy.FULL_SHARD
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        model, sharding_strategy=strategy, device_mesh=mesh, device_id=cpu, use_orig_params=True
    )


Wrap = Callable[[Any], Wrapped]


def wrappers() -> tuple[dict[str, Wrap], dict[str, Wrap]]:
    """Return the wrappers, and variants of them, by name."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    context = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    line = init_device_mesh("cpu", (4,))
    half = grid.get_local_rank("dp"), 2
    main: dict[str, Wrap] = {
        "ddp": lambda m: data_parallel(DistributedDataParallel(m)),
        "fsdp1": lambda m: data_parallel(fsdp1(m)),
        "fsdp1, hybrid": lambda m: data_parallel(fsdp1(m, hybrid)),
        "fsdp2": lambda m: data_parallel(fully_shard(m)),
        "fsdp2, hybrid": lambda m: data_parallel(fully_shard(m, mesh=hybrid)),
        "fsdp2 x tp": lambda m: Wrapped(
            fully_shard(tensor_parallel(m, grid["tp"]), mesh=grid["dp"]), *half
        ),
        "fsdp2 x cp": lambda m: context_parallel(m, context),
        "replicate": lambda m: data_parallel(replicate(m)),
    }
    variants: dict[str, Wrap] = {
        "ddp inside": lambda m: data_parallel(nn.Sequential(DistributedDataParallel(m))),
        "ddp, averaging hook": lambda m: data_parallel(hooked(m, allreduce_hook), divisor=4),
        "ddp, summing hook": lambda m: data_parallel(
            hooked(m, lambda _, bucket: summed(bucket)), divisor=1
        ),
        "ddp x tp": lambda m: ddp_of_tensor_parallel(m, grid),
        "fsdp2, divide factor": lambda m: data_parallel(divided(m, 3), divisor=3),
        "fsdp2, hybrid, divide factor": lambda m: data_parallel(divided(m, 1, hybrid), divisor=1),
        "tp": lambda m: Wrapped(tensor_parallel(m, line), 0, 1),
        "own all-reduce": lambda m: own_reduction(m, hybrid),
    }
    return main, variants


@pytest.mark.slow
@pytest.mark.parametrize("splits", [10, nightly(100)])
@ranks(4)
def test_the_gradient_is_that_of_the_global_mean_under_every_wrapper(splits: int) -> None:
    torch.manual_seed(0)
    original = Model()
    double = copy.deepcopy(original).double()
    expected: dict[tuple[int, int], tuple[float, list[Tensor]]] = {}
    main, variants = wrappers()
    for name, wrap in (main | variants).items():
        wrapped = wrap(copy.deepcopy(original))
        parameters = [*wrapped.model.parameters()]  # DDP hides tensor-parallel ones in a forward
        for seed in range(splits if name in main else VARIANT_SPLITS):
            step = split(seed, wrapped.data_ranks)
            key = seed, wrapped.data_ranks
            if key not in expected:
                expected[key] = reference(double, step)
            mean, gradient = expected[key]
            value, computed = train(wrapped, parameters, step)
            assert relative_error(computed, gradient) <= 1e-6, f"{name}, split {seed}"
            assert abs(value - mean) <= 1e-6 * mean, f"{name}, split {seed}"


def refused(module: Any, **arguments: Any) -> str:
    values = {"loss_sum": torch.ones((), requires_grad=True), "weight": 1, **arguments}
    with pytest.raises(ConfigError) as error:
        distmp.global_mean(module=module, **values)
    return str(error.value)


FULL = torch.ones(2, requires_grad=True).sum()
HALF = torch.ones(2, dtype=torch.float16, requires_grad=True).sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_sum": torch.ones(3)}, "loss_sum = (3,): must be a tensor with one element"),
        ({"loss_sum": 1.0}, "loss_sum = 1.0: must be a tensor with one element"),
        ({"loss_sum": torch.ones((), dtype=torch.bfloat16)}, "loss_sum = torch.bfloat16: rounds"),
        ({"loss_sum": HALF.float()}, "loss_sum = torch.float16: rounds the sum"),
        ({"loss_sum": FULL.bfloat16()}, "loss_sum = torch.bfloat16: rounds the sum"),
        (
            {"weight": torch.ones(257, dtype=torch.bfloat16).sum()},
            "weight = torch.bfloat16: rounds",
        ),
        ({"weight": torch.ones(2)}, "must have one real element and require no gradient"),
        ({"weight": torch.ones((), requires_grad=True)}, "require no gradient; sum it and detach"),
        ({"weight": True}, "weight = True: must be a number or a tensor with one element"),
        ({"weight": "3"}, "weight = '3': must be a number or a tensor with one element"),
        ({"weight": -1}, "weight = -1: must be finite, and 0 or more"),
        ({"weight": float("nan")}, "weight = nan: must be finite, and 0 or more"),
        ({"module": [nn.Linear(1, 1)]}, "module = 'list': must be the torch.nn.Module to train"),
        ({"group": -100}, "group = -100: use a process group that has this rank, or a mesh"),
        ({"microbatches": 0}, "microbatches = 0: must be an integer of 1 or more"),
        ({"microbatches": True}, "microbatches = True: must be an integer of 1 or more"),
        ({"microbatches": 2.0}, "microbatches = 2.0: must be an integer of 1 or more"),
        ({"microbatches": 1.5}, "microbatches = 1.5: must be an integer of 1 or more"),
        ({"divisor": 0}, "divisor = 0: must be a number above 0"),
    ],
)
def test_misuse_is_refused(arguments: dict[str, Any], message: str) -> None:
    assert message in refused(**{"module": nn.Linear(1, 1), **arguments})


def test_a_number_of_microbatches_may_be_of_numpy() -> None:
    module, loss_sum = nn.Linear(1, 1), torch.ones((), requires_grad=True) * 6
    mean = distmp.global_mean(loss_sum, 3, module, microbatches=np.int64(2))
    assert mean == distmp.global_mean(loss_sum, 3, module, microbatches=2)


@ranks(2)
def test_different_numbers_of_microbatches_are_refused_on_all_ranks() -> None:
    wrapped = DistributedDataParallel(nn.Linear(1, 1))
    count = 2 + dist.get_rank()
    with wrapped.no_sync():
        message = refused(module=wrapped, microbatches=count, loss_sum=wrapped(FULL[None]).sum())
    assert (
        f"microbatches = {count}: differs between ranks; ranks with fewer need additional ones"
        in message
    )


@ranks(2)
def test_a_loss_sum_that_does_not_depend_on_the_model_is_refused() -> None:
    wrapped = DistributedDataParallel(nn.Linear(1, 1))
    for zero in (torch.zeros(()), torch.zeros((), requires_grad=True)):
        message = refused(module=wrapped, loss_sum=zero)
        assert "such as model(inputs).sum() * 0 for a microbatch without samples" in message
    with torch.no_grad():
        distmp.global_mean(torch.zeros(()), 0, wrapped)
    wrapped.eval()
    distmp.global_mean(torch.zeros(()), 0, wrapped)
    wrapped.train().requires_grad_(False)
    distmp.global_mean(wrapped(FULL[None]).sum(), 1, wrapped)


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(4)),
    "cast and divided": lambda x: (F.mse_loss(x, torch.zeros(4, 4)).double() / 2).float(),
    "mean": lambda x: x.mean(),
}
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: F.cross_entropy(x, torch.arange(4), reduction="sum"),
    "mean times weight": lambda x: F.cross_entropy(x, torch.arange(4)) * 4,
    "sum of means": lambda x: x.mean(1).sum(),
}


def accumulate(weights: Sequence[float], *, set_to_none: bool = True) -> None:
    """Take two steps whose microbatches have these weights."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for weight in weights:
            loss_sum = model(torch.ones(4, 4)).square().sum()
            # The weights of the second step are others.
            loss = distmp.global_mean(loss_sum, weight + step, model, microbatches=len(weights))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_weight_of_one_microbatch_is_warned_of(set_to_none: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulate([8, torch.tensor(8)], set_to_none=set_to_none)  # type: ignore[list-item]
    with pytest.warns(RuntimeWarning, match="weight = 5: differs from the first") as found:
        accumulate([3, 5], set_to_none=set_to_none)
    assert [warning.filename for warning in found] == [__file__] * 2


def test_two_losses_of_a_microbatch_may_have_a_weight_each(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = nn.Linear(4, 4)
    for _ in range(2):
        outputs = model(torch.ones(4, 4)).square()
        losses = [distmp.global_mean(outputs.sum(), n, model, microbatches=2) for n in (8, 32)]
        sum(losses, torch.zeros(())).backward()
    with torch.no_grad():
        distmp.global_mean(torch.ones(()), 5, model, microbatches=2)
    assert not recwarn


def test_a_mean_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Linear(4, 4)
    for loss in SUMS.values():
        distmp.global_mean(loss(model(torch.ones(4, 4))), 4, model)
    mean = model(torch.ones(4, 4)).mean()
    distmp.global_mean(mean, 2, model, microbatches=2)  # the mean of one sample is its sum
    distmp.global_mean(mean * 1, 9, model, microbatches=2)
    assert not recwarn
    with pytest.warns(RuntimeWarning, match="is a mean already; pass the sum"):
        distmp.global_mean(mean, 9, model, microbatches=2)
    for loss in MEANS.values():
        for weight in (4, torch.tensor(4)):
            with pytest.warns(RuntimeWarning, match="is a mean already; pass the sum.* weight 4"):
                distmp.global_mean(loss(model(torch.ones(4, 4))), weight, model)


@ranks(4)
def test_modules_that_are_reduced_in_an_unknown_way_are_refused() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    unwrapped = "is not wrapped in DDP or FSDP, so it is unknown"
    assert unwrapped in refused(nn.Linear(4, 4))
    assert unwrapped in refused(nn.Linear(4, 4), group=dist.group.WORLD)
    assert unwrapped in refused(nn.Linear(4, 4), divisor=4)
    # The ranks of the other dimension may see other tokens.
    assert unwrapped in refused(
        parallelize_module(nn.Linear(4, 4), grid["shard"], ColwiseParallel())
    )

    unknown = "reduces gradients in its own way; pass the number by which it divides"
    ddp = hooked(nn.Linear(4, 4), lambda _, bucket: summed(bucket))
    assert f"<lambda> {unknown}" in refused(ddp)
    fsdp1 = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    fsdp1.register_comm_hook(None, summed_shard)
    assert f"summed_shard {unknown}" in refused(fsdp1)
    fsdp2: Any = fully_shard(nn.Linear(4, 4))
    fsdp2.set_all_reduce_hook(print)
    assert f"print {unknown}" in refused(fsdp2)
    accumulates = "the module accumulates gradients without reducing them"
    for wrapped in (ddp, fsdp1):
        with wrapped.no_sync():
            assert accumulates in refused(wrapped)
    for accumulate in (fsdp2.set_requires_gradient_sync, fsdp2.set_requires_all_reduce):
        accumulate(False)
        assert accumulates in refused(fsdp2)
        accumulate(True)
    with ddp.join():
        assert "join() lets ranks stop early" in refused(ddp)

    head = nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert "module = '1.weight': no wrapper reduces its gradient" in refused(head)

    factor: Any = fully_shard(nn.Linear(4, 4))
    factor.set_gradient_divide_factor(2)
    assert f"set_gradient_divide_factor() {unknown}" in refused(factor)
    meshes = [grid["shard"], init_device_mesh("cpu", (4,))]
    different = nn.Sequential(*(fully_shard(nn.Linear(4, 4), mesh=mesh) for mesh in meshes))
    assert "parts of the module reduce gradients over different ranks" in refused(different)
    numbers = "parts of the module divide gradients by different numbers, 2, 4"
    assert numbers in refused(different, group=dist.group.WORLD)
    half = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        assert "use a process group that has this rank" in refused(fsdp2, group=half)
        message = f"does not contain this rank, {dist.get_rank()}"
        assert message in refused(fsdp2, group=DeviceMesh("cpu", [0, 1]))
    else:
        DeviceMesh("cpu", [0, 1])


@ranks(2)
def test_parameters_that_a_wrapper_ignores_are_refused() -> None:
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ignore(layers, ["1.bias"])
    assert "module.1.bias': no wrapper reduces" in refused(DistributedDataParallel(layers))
    fsdp1 = FullyShardedDataParallel(
        nn.Sequential(layers[0], nn.Linear(4, 4)),
        ignored_modules=[layers[0]],
        device_id=torch.device("cpu"),
    )
    assert "0.weight': no wrapper reduces its gradient" in refused(fsdp1)
    ignore(layers, [])
    delaying = DistributedDataParallel(
        layers,
        delay_all_reduce_named_params=[("0.weight", layers[0].weight)],
        param_to_hook_all_reduce=layers[1].bias,
    )
    distmp.global_mean(delaying(torch.ones(2, 4)).sum(), 2, delaying)


@ranks(2)
def test_parameters_that_are_unfrozen_after_ddp_was_built_are_refused() -> None:
    layers = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    ddp = DistributedDataParallel(layers)
    outer = nn.Sequential(ddp, nn.Linear(4, 4).requires_grad_(False))
    for module in (ddp, outer):
        distmp.global_mean(module(torch.ones(2, 4)).sum(), 2, module)
    outer[1].requires_grad_(True)
    assert "module = '1.weight': no wrapper reduces its gradient" in refused(outer)
    outer[1].requires_grad_(False)
    layers.requires_grad_(True)
    for module in (ddp, outer):
        assert "or DDP was built while some parameters were frozen" in refused(module)
    outer[0] = DistributedDataParallel(layers)
    distmp.global_mean(outer(torch.ones(2, 4)).sum(), 2, outer)


@ranks(2)
def test_a_layer_that_is_replaced_after_a_call_is_refused() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    distmp.global_mean(ddp(torch.ones(2, 4)).sum(), 2, ddp)
    ddp.module[1] = nn.Linear(4, 4)
    assert "module.1.weight': no wrapper reduces its gradient" in refused(ddp)


def test_a_sharded_model_is_freed_after_a_call() -> None:
    run_ranks(free_sharded_model, 1)


def free_sharded_model() -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), nn.Linear(4, 4)))
    distmp.global_mean(model(torch.ones(2, 4)).sum(), 2, model).backward()
    parts = [weakref.ref(part) for part in model.modules()]
    del model
    gc.collect()
    assert [part() for part in parts] == [None] * 3


def summed_shard(state: Any, full: Tensor, shard: Tensor) -> None:
    raise AssertionError("never called")


@ranks(2)
def test_values_and_gradients_are_the_same_on_all_ranks() -> None:
    rank = dist.get_rank()
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, 0.5)  # products are exact
    model = DistributedDataParallel(linear)

    def step(loss: float, weight: Tensor | float, dtype: torch.dtype = torch.float32) -> Any:
        model.zero_grad()
        total = (loss * model(torch.ones(1, 1)) / model.module.weight.detach()).sum().to(dtype)
        mean = distmp.global_mean(total, weight, model)
        mean.backward()
        return (
            mean.dtype,
            mean.item(),
            linear.weight.grad.item() * model.module.weight.item(),
        )

    # Rank 0 has 1 token with a loss of 4, rank 1 has 3 tokens with a loss of 20 together.
    number = 1 + 2 * rank
    tensors = torch.tensor(number), torch.tensor([1.0 * number])
    for weight in (number, np.int64(number), *tensors):
        for dtype in (torch.float32, torch.float64):
            assert step(4.0 + 16 * rank, weight, dtype) == (dtype, 6.0, pytest.approx(6.0))
    assert step(4.0, 0) == (torch.float32, 0.0, 0.0)
    for weight in (-1, torch.inf, torch.nan):
        dtype, *values = step(4.0, torch.tensor(1.0 if rank else weight))
        assert torch.tensor(values).isnan().all(), weight
    with torch.no_grad():
        assert distmp.global_mean(torch.tensor(1.0 + rank), 1, model).item() == 1.5

    scaler = distmp.DistributedGradScaler("cpu", init_scale=8.0)
    model.zero_grad()
    total = model(torch.ones(1, 1)).sum() * (1 + rank)
    scaler.scale(distmp.global_mean(total, 1 + rank, model)).backward()
    assert linear.weight.grad.item() == 8.0


@ranks(2)
def test_a_loss_that_is_a_dtensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = nn.Linear(4, 6)
    plan = ColwiseParallel(use_local_output=False)
    model = parallelize_module(copy.deepcopy(plain), mesh, plan)
    inputs, labels = torch.randn(5, 4), torch.tensor([0, 5, 2, -100, 3])
    F.cross_entropy(plain(inputs), labels, ignore_index=-100).backward()
    with loss_parallel():
        total = F.cross_entropy(model(inputs), labels, ignore_index=-100, reduction="sum")
        assert isinstance(total, DTensor)
        distmp.global_mean(total, 4, model).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad)


@pytest.mark.gpu
@ranks(2, cuda=True)
def test_on_a_gpu_the_host_does_not_wait() -> None:
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(1, 1, device="cuda"))
    total = torch.full((), 1.0 + rank, device="cuda", requires_grad=True)
    tokens = 1 + 2 * rank
    for weight in (tokens, torch.tensor(tokens).pin_memory(), torch.tensor(float(tokens)).cuda()):
        with no_waiting():
            loss = distmp.global_mean(total.clone(), weight, model)
            loss.backward()
        assert loss.item() == 3 / 4
        assert total.grad.item() == 2 / 4
        total.grad = None
