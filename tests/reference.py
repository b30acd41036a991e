"""A small model, its batches, and a plain training loop in float64 as the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distmp.engine.engine import Engine
from distmp.engine.outcome import StepNumbers
from distmp.engine.setup import LossFunction
from distmp.utils.flat_shard import FlatShard

# A second thread does not pay off for such small tensors.
torch.set_num_threads(1)

INPUTS, WIDTH, CLASSES = 6, 12, 5

# Microbatch sizes by step and rank; all differ, and rank 1 has no samples in one step.
TWO_RANKS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((3, 5), (1, 7)),
    ((8, 1), (0, 0)),
    ((2, 2), (6, 4)),
    ((0, 9), (3, 1)),
)
FOUR_RANKS = (
    ((3,), (5,), (1,), (7,)),
    ((8,), (1,), (0,), (0,)),
    ((2,), (2,), (6,), (4,)),
    ((0,), (9,), (3,), (1,)),
)
ONE_RANK = tuple((tuple(size for sizes in step for size in sizes),) for step in FOUR_RANKS)


class Batch(NamedTuple):
    inputs: Tensor
    labels: Tensor
    factor: float = 1.0


class Block(nn.Module):
    """Four parameters, two of which are kept in FP32 by 16-bit policies."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(seed: int = 0) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Classifier()


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
    """Return the sum of the cross entropy, and the number of samples as its weight."""
    total = F.cross_entropy(model(batch.inputs), batch.labels, reduction="sum")
    return total * batch.factor, len(batch.labels)


def sum_of_squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, float]:
    return model(batch).square().sum(), len(batch)


def samples(step: int, count: int) -> Batch:
    """Return the samples of a step, independent of their distribution over ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(count, INPUTS, generator=generator)
    return Batch(inputs, torch.randint(CLASSES, (count,), generator=generator))


def microbatches(step: int, sizes: Sequence[Sequence[int]], rank: int = 0) -> list[Batch]:
    """Return the microbatches of `rank` in a step; `sizes` are by rank and microbatch."""
    batch = samples(step, sum(map(sum, sizes)))
    flat = [size for rank_sizes in sizes for size in rank_sizes]
    parts = zip(batch.inputs.split(flat), batch.labels.split(flat), strict=True)
    before = sum(len(rank_sizes) for rank_sizes in sizes[:rank])
    return [Batch(*part) for part in parts][before : before + len(sizes[rank])]


def adamw(parameters: Any, fused: bool | None = None, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=fused, **options)


def sgd(parameters: Any, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, fused=fused)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adagrad(parameters: Any, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.05, fused=fused)


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return adamw(parameters, fused=True)


def foreach_adamw(parameters: Any) -> torch.optim.Optimizer:
    return adamw(parameters, foreach=True)


def fused_sgd(parameters: Any) -> torch.optim.Optimizer:
    return sgd(parameters, fused=True)


def fused_adagrad(parameters: Any) -> torch.optim.Optimizer:
    return adagrad(parameters, fused=True)


def make_engine(**options: Any) -> Engine:
    """Build an engine on the CPU; by default with `make_model`, `loss`, fused AdamW and FP32."""
    options = {"optimizer": fused_adamw, "policy": "fp32", "device": "cpu", **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = options.pop("model", None) or make_model()
        return Engine(model, options.pop("loss", loss), **options)


def replace_loss(engine: Engine, function: LossFunction) -> None:
    """Let an engine train on another loss function, which its users cannot do."""
    object.__setattr__(engine._setup, "loss", function)


def train(
    engine: Engine, steps: int, sizes: Sequence[Sequence[Sequence[int]]], first: int = 0
) -> list[StepNumbers]:
    """Take steps on this rank's part of each step's samples; return their numbers."""
    return [
        engine.step(microbatches(step, sizes[step % len(sizes)], engine.world.rank)).numbers
        for step in range(first, first + steps)
    ]


def weights(engine: Engine) -> dict[str, Tensor]:
    """Return a copy of the full FP32 weights."""
    state = engine.state_dict()
    return gathered(
        {
            name.removeprefix("model/"): tensor
            for name, tensor in state.items()
            if name.startswith("model/")
        }
    )


def snapshot(engine: Engine) -> dict[str, Tensor]:
    """Return a copy of everything that training continues from, whole."""
    return gathered(engine.state_dict())


def trained(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights and the optimizer's state of a snapshot."""
    return {k: v for k, v in state.items() if k.startswith(("model/", "optimizer/"))}


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert different == []


@torch.no_grad()
def gathered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors, full tensors for shards; all ranks have to call it.

    One reduction per process group: tensors are small, and there are many.
    """
    full = {}
    by_group: dict[Any, list[Tensor]] = {}
    for name, tensor in tensors.items():
        shape = tensor.global_shape if isinstance(tensor, FlatShard) else tensor.shape
        full[name] = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        group = _insert(tensor, full[name])
        if group is not None:
            by_group.setdefault(group, []).append(full[name])
    for group, shards in by_group.items():
        # Each element comes from one rank, and is zero on the others. As bytes, it keeps its bits.
        flat = torch.cat([shard.view(-1).view(torch.uint8) for shard in shards])
        dist.all_reduce(flat, dist.ReduceOp.MAX, group)
        sizes = [shard.nbytes for shard in shards]
        for shard, part in zip(shards, flat.split(sizes), strict=True):
            shard.copy_(part.view(shard.dtype).view(shard.shape))
    return full


def _insert(tensor: Tensor, full: Tensor) -> dist.ProcessGroup | None:
    """Write this rank's elements into `full`; return the group whose ranks have the others."""
    if isinstance(tensor, FlatShard):
        full.view(-1)[tensor.start : tensor.start + tensor.numel()] = tensor.as_subclass(Tensor)
        return dist.group.WORLD
    if not isinstance(tensor, DTensor):
        full.copy_(tensor)
        return None
    (dimension,) = (d for d, kind in enumerate(tensor.placements) if not kind.is_replicate())
    for chunk in tensor.__create_chunk_list__():
        place = tuple(
            slice(start, start + size)
            for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
        )
        full[place] = tensor.to_local()
    return tensor.device_mesh.get_group(dimension)


# The same updates by another implementation.
PLAIN = {fused_adamw: adamw, foreach_adamw: adamw, fused_sgd: sgd, fused_adagrad: adagrad}


def plain_training(
    steps: int,
    sizes: Sequence[Sequence[Sequence[int]]],
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    max_norm: float | None = None,
) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """Train in float64 on all samples of each step in one batch, as in torch's documentation.

    Returns:
        The weights, and loss and gradient norm of each step.
    """
    model = make_model().double()
    stepper = optimizer(model.parameters())
    numbers = []
    for step in range(steps):
        batch = samples(step, sum(map(sum, sizes[step % len(sizes)])))
        stepper.zero_grad()
        mean = F.cross_entropy(model(batch.inputs.double()), batch.labels)
        mean.backward()
        limit = float("inf") if max_norm is None else max_norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        stepper.step()
        numbers.append((mean.item(), norm.item()))
    return {name: value.detach() for name, value in model.named_parameters()}, numbers


def error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the distance between weights relative to how far training has moved the second."""
    assert found.keys() == expected.keys()
    start = dict(make_model().named_parameters())
    apart = torch.cat([(found[k].double() - expected[k].double()).flatten() for k in expected])
    moved = torch.cat([(expected[k].double() - start[k].double()).flatten() for k in expected])
    return float((apart.norm() / moved.norm()).detach())
