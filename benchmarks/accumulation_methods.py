"""Methods that accumulate gradients of bfloat16 microbatches, and the tasks to compare them."""

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
from distmp.models.architecture import build_model
from distmp.models.loss import next_token_loss
from distmp.models.settings import ModelConfig

RATE = 1e-4
VOCABULARY = 258


@dataclass(frozen=True)
class Task:
    """The model and data that all methods of a comparison train.

    Attributes:
        make_model: Builds the model in FP32, always with the same weights, which have bfloat16
            values.
        batches: Microbatches of this rank, which are repeated if a step has more.
        loss: Returns the loss sum over a microbatch, and its weight.
        weight: The weight of every microbatch.
        device: Device of the model and the data.
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
        """Return a loss whose gradients sum to that of the mean over `count` microbatches."""
        return self.loss(model, batch)[0] / (self.weight * count)


def transformer(size: str, count: int, samples: int, length: int, device: torch.device) -> Task:
    """Return a task with distmp's transformer on random tokens, the same on every rank.

    Args:
        size: Named size of the transformer.
        count: Number of different microbatches.
        samples: Number of sequences per microbatch.
        length: Number of tokens per sequence.
        device: Device of the task.
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
        width: Number of inputs and outputs of each layer.
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
    """Return a task in which all methods have bit-identical bfloat16 gradients per microbatch.

    Args:
        width: Width of the layers, a power of two.
        depth: Number of layers.
        count: Number of different microbatches.
        samples: Number of samples per microbatch, a power of two, so that a mean is as exact as a
            sum.
        rank: The rank, which determines the samples.
        device: Device of the task.
    """

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        with device:
            return Regression(width, depth).bfloat16().float()

    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(count, samples, width, generator=generator).bfloat16().to(device)
    # Targets far from the model's outputs, so that gradients of microbatches have a common
    # direction, as they do early in training.
    targets = (inputs.float().roll(1, -1) + 1).bfloat16()
    # Separate storages, so that the memory of one microbatch is not that of all.
    batches = [(one.clone(), two.clone()) for one, two in zip(inputs, targets, strict=True)]
    return Task(make_model, batches, _squared_error, samples * width, device)


def _squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    inputs, targets = batch
    return F.mse_loss(model(inputs).float(), targets.float(), reduction="sum"), inputs.numel()


class AccumulationMethod(ABC):
    """Trains a model on all ranks with plain SGD, which has no optimizer state."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = task.make_model()

    @abstractmethod
    def step(self, count: int) -> None:
        """Train on `count` microbatches."""

    @abstractmethod
    def gradients(self, count: int) -> dict[str, Tensor]:
        """Return the full gradients of a step by name, as means over microbatches and ranks."""


class ByHand(AccumulationMethod):
    """A method with separate accumulation and update."""

    _optimizer: torch.optim.Optimizer

    def step(self, count: int) -> None:
        self.accumulate(count)
        self.update()

    def gradients(self, count: int) -> dict[str, Tensor]:
        self.accumulate(count)
        full = {name: _full(parameter.grad) for name, parameter in self.model.named_parameters()}
        self.model.zero_grad()
        return full

    @abstractmethod
    def accumulate(self, count: int) -> None:
        """Run forward and backward of all microbatches, and reduce the gradients."""

    def update(self) -> None:
        """Update the weights and clear the gradients."""
        self._optimizer.step()
        self._optimizer.zero_grad()


def _full(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


class TorchDDP(ByHand):
    """torch's DDP with reduction in the last microbatch."""

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
    """FSDP2 per block with bfloat16 compute and FP32 reduction in the last microbatch."""

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
    """distmp's buckets alone, with bfloat16 parameters and without master weights."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.model.bfloat16()
        self._buckets = Fp32GradBuckets(self.model.named_parameters(), dist.group.WORLD)

    def accumulate(self, count: int) -> None:
        self._buckets.begin_step()
        for index, batch in enumerate(self.task.microbatches(count)):
            self._buckets.begin_microbatch(last=index == count - 1)
            loss = self.task.mean_loss(self.model, batch, count)
            with self._buckets.backward_context(loss):
                loss.backward()
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
    """A full step of distmp's engine, with FP32 master weights.

    Attribution is disabled: its 5 KB of generator state per microbatch would be significant only
    for such a small model.
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
        gradients = {}

        def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    gradients[name] = parameter.grad.clone()

        handle = self._engine.optimizer.register_step_pre_hook(record)
        self.step(count)
        handle.remove()
        return gradients


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
