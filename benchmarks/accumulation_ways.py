"""Ways to accumulate the gradients of microbatches in bfloat16, and what they are tried on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.loops import shard
from distmp import Engine, Fp32GradBuckets
from distmp.models.build import build_model
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig

RATE = 1e-4
VOCABULARY = 258


@dataclass(frozen=True)
class Task:
    """What every way of a comparison trains, on the same device.

    Attributes:
        make_model: Builds the model in FP32, with the same weights every time, bfloat16 values.
        batches: Microbatches of this rank; they are gone through again where a step has more.
        loss: Returns the loss sum over a microbatch, and its weight.
        weight: The weight of every microbatch.
        device: Where all of it is.
    """

    make_model: Callable[[], nn.Module]
    batches: Sequence[Any]
    loss: Callable[[nn.Module, Any], tuple[Tensor, Any]]
    weight: int
    device: torch.device

    def microbatches(self, count: int) -> list[Any]:
        """Return the microbatches of a step."""
        return [self.batches[index % len(self.batches)] for index in range(count)]

    def mean_loss(self, model: nn.Module, batch: Any, count: int) -> Tensor:
        """Return the loss whose gradients add up to that of the mean over `count` microbatches."""
        return self.loss(model, batch)[0] / (self.weight * count)


def transformer(size: str, count: int, samples: int, length: int, device: torch.device) -> Task:
    """Return the task of distmp's transformer, on random tokens, the same on every rank.

    Args:
        size: Named size.
        count: Number of different microbatches.
        samples: Sequences in each.
        length: Tokens in each sequence.
        device: Where to train.
    """

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        with device:
            return build_model(ModelConfig(size=size), VOCABULARY, length)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (count, samples, length + 1), generator=generator)
    batches = [{"inputs": one[:, :-1], "targets": one[:, 1:]} for one in tokens.to(device)]
    return Task(make_model, batches, next_token_loss, samples * length, device)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add a hidden layer to the residual stream."""
        return x + torch.tanh(self.linear(x))


class Regression(nn.Module):
    """Linear layers with residual connections.

    Args:
        width: Inputs and outputs of each layer.
        depth: Number of layers.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions, shape and dtype of `x`."""
        for block in self.blocks:
            x = block(x)
        return x


def regression(
    width: int, depth: int, count: int, samples: int, rank: int, device: torch.device
) -> Task:
    """Return a task in which all ways see the same bfloat16 gradients of a microbatch, bit by bit.

    Args:
        width: Of the layers; a power of two.
        depth: Number of layers.
        count: Number of different microbatches.
        samples: In each; a power of two, so that a mean is as exact as a sum.
        rank: Every rank has samples of its own.
        device: Where to train.
    """

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        with device:
            return Regression(width, depth).bfloat16().float()

    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(count, samples, width, generator=generator).bfloat16().to(device)
    # Targets that the model is far from, so that microbatches agree on a direction, as they do
    # early in a training.
    targets = (inputs.float().roll(1, -1) + 1).bfloat16()
    # Memory of their own, so that whoever looks at one does not see all of them.
    batches = [(one.clone(), two.clone()) for one, two in zip(inputs, targets, strict=True)]
    return Task(make_model, batches, _squared_error, samples * width, device)


def _squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    inputs, targets = batch
    return F.mse_loss(model(inputs).float(), targets.float(), reduction="sum"), inputs.numel()


class AccumulationMethod(ABC):
    """A model that trains by plain SGD, so that no optimizer state counts, on all ranks."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = task.make_model()

    @abstractmethod
    def step(self, count: int) -> None:
        """Train on `count` microbatches."""

    @abstractmethod
    def gradients(self, count: int) -> dict[str, Tensor]:
        """Return the mean gradients over microbatches and ranks that a step has, whole, by name."""


class ByHand(AccumulationMethod):
    """A way that accumulates, and updates after that."""

    _optimizer: torch.optim.Optimizer

    def step(self, count: int) -> None:
        self.accumulate(count)
        self.update()

    def gradients(self, count: int) -> dict[str, Tensor]:
        self.accumulate(count)
        found = {name: _whole(parameter.grad) for name, parameter in self.model.named_parameters()}
        self.model.zero_grad()
        return found

    @abstractmethod
    def accumulate(self, count: int) -> None:
        """Run forward and backward of all microbatches, and reduce."""

    def update(self) -> None:
        """Change the weights, and forget the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


class TorchDDP(ByHand):
    """torch's DDP, reducing in the last microbatch."""

    def __init__(self, task: Task, *, autocast: bool) -> None:
        super().__init__(task)
        self._autocast = autocast
        module = self.model if autocast else self.model.bfloat16()
        self._ddp = DistributedDataParallel(module)
        self._optimizer = torch.optim.SGD(module.parameters(), RATE, fused=True)

    def accumulate(self, count: int) -> None:
        for index, batch in enumerate(self.task.microbatches(count)):
            self._ddp.require_backward_grad_sync = index == count - 1
            with torch.autocast(self.task.device.type, torch.bfloat16, enabled=self._autocast):
                loss = self.task.mean_loss(self._ddp, batch, count)
            loss.backward()


class Fsdp2(ByHand):
    """FSDP2 per block, bfloat16 compute and FP32 reduction in the last microbatch."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        mesh = init_device_mesh(task.device.type, (dist.get_world_size(),))
        self._sharded = shard(self.model, torch.bfloat16, mesh)
        self._optimizer = torch.optim.SGD(self.model.parameters(), RATE)

    def accumulate(self, count: int) -> None:
        for index, batch in enumerate(self.task.microbatches(count)):
            self._sharded.set_requires_gradient_sync(index == count - 1)
            self.task.mean_loss(self.model, batch, count).backward()


class Buckets(ByHand):
    """distmp's buckets by themselves, with bfloat16 parameters and no masters."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.model.bfloat16()
        self._buckets = Fp32GradBuckets(self.model.named_parameters(), dist.group.WORLD)

    def accumulate(self, count: int) -> None:
        self._buckets.begin_step()
        for index, batch in enumerate(self.task.microbatches(count)):
            self._buckets.begin_microbatch(last=index == count - 1)
            self.task.mean_loss(self.model, batch, count).backward()
            self._buckets.end_microbatch()
        self._buckets.finish()

    def update(self) -> None:
        rate = RATE / self._buckets.world_size
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-rate)

    def gradients(self, count: int) -> dict[str, Tensor]:
        sums = super().gradients(count)
        return {name: total / self._buckets.world_size for name, total in sums.items()}


class DistmpEngine(AccumulationMethod):
    """distmp's whole step, with FP32 masters.

    Without attribution, whose 5 KB for the random generators of each microbatch would be much
    beside a small model, and are nothing beside others.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        **options: bool,
    ) -> None:
        super().__init__(task)
        self._engine = Engine(
            self.model,
            task.loss,
            lambda parameters: optimizer(parameters, RATE, fused=True),
            policy="bf16",
            strategy="ddp",
            device=task.device,
            attribution=False,
            **options,  # type: ignore[arg-type]
        )

    def step(self, count: int) -> None:
        self._engine.step(self.task.microbatches(count))

    def gradients(self, count: int) -> dict[str, Tensor]:
        found = {}

        def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    # What fused optimizers do themselves.
                    found[name] = parameter.grad / optimizer.grad_scale  # type: ignore[attr-defined]

        handle = self._engine.optimizer.register_step_pre_hook(look)
        self.step(count)
        handle.remove()
        return found


DDP_BF16 = "torch DDP, bf16 parameters"
DDP_AUTOCAST = "torch DDP, fp32 parameters, bf16 autocast"

METHODS: dict[str, Callable[[Task], AccumulationMethod]] = {
    DDP_BF16: lambda task: TorchDDP(task, autocast=False),
    DDP_AUTOCAST: lambda task: TorchDDP(task, autocast=True),
    "FSDP2, bf16 compute, fp32 reduce": Fsdp2,
    "distmp.Fp32GradBuckets, bf16 parameters": Buckets,
    "distmp.Engine, bf16, FP32 masters": DistmpEngine,
    "the same, reproducible": lambda task: DistmpEngine(task, reproducible=True),
}
