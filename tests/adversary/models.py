"""Models, data and loss of a case: the same code for the engine and, in float64, for the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, mse_loss, silu

from tests.adversary.cases import Case, Fault, Microbatch, ModelSpec

FEATURES = 4
CHANNELS = 2
CLASSES = 3
VOCABULARY = 7

Batch = Mapping[str, Any]
# The number of a call of an activation, and the index of an element of its input.
Place = tuple[int, int]


class Relu:
    """ReLU, whose other branch the oracle may take for some elements.

    Attributes:
        inputs: The inputs of all calls, if they are recorded.
        flipped: Places whose other branch is taken, while inputs are recorded.
    """

    def __init__(self) -> None:
        self.inputs: list[Tensor] | None = None
        self.flipped: list[Place] = []

    def __call__(self, x: Tensor) -> Tensor:
        if self.inputs is None:
            return torch.relu(x)
        flipped = torch.zeros(x.numel(), dtype=torch.bool)
        flipped[[element for call, element in self.flipped if call == len(self.inputs)]] = True
        self.inputs.append(x.detach())
        return torch.where(~(x <= 0) ^ flipped.view(x.shape), x, 0.0)  # NaN passes


SMOOTH = {"tanh": torch.tanh, "gelu": gelu, "silu": silu}


class Model(nn.Module):
    """A model with a first layer, residual blocks, a head, and parts that only some batches use."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.kind = spec.kind
        self.stem = _stem(spec)
        self.blocks = nn.ModuleList(Block(spec, first=index == 0) for index in range(spec.blocks))
        self.side = nn.Linear(spec.width, spec.width)
        self.offset = nn.Parameter(torch.zeros(spec.width))
        self.head = nn.Linear(spec.width, VOCABULARY if spec.kind == "embedding" else CLASSES)
        if spec.tied:
            self.head.weight = self.stem.weight
        if spec.unused:
            self.spare = nn.Parameter(torch.zeros(3))

    def forward(self, batch: Batch) -> Tensor:
        uses, fault = batch["uses"], batch["fault"]
        hidden = self.stem(batch["x"])
        if self.kind == "embedding":
            hidden = hidden.mean(1)
        hidden = _inject(hidden, fault, "stem")
        *blocks, last = self.blocks
        for block in blocks:
            hidden = block(hidden, uses)
        if "block" in uses:
            hidden = last(hidden, uses)
        if self.kind == "conv":
            hidden = hidden.mean((2, 3))
        if "offset" in uses:
            hidden = hidden + self.offset
        if "side" in uses:
            hidden = hidden + torch.tanh(self.side(hidden))
        return _inject(self.head(hidden), fault, "output")


def _stem(spec: ModelSpec) -> nn.Module:
    if spec.kind == "linear":
        return nn.Linear(FEATURES, spec.width)
    if spec.kind == "conv":
        return nn.Conv2d(CHANNELS, spec.width, 3, padding=1)
    return nn.Embedding(VOCABULARY, spec.width)


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, *, first: bool) -> None:
        super().__init__()
        width = spec.width
        self.conv = spec.kind == "conv"
        self.activation = Relu() if spec.activation == "relu" else SMOOTH[spec.activation]
        self.core = nn.Conv2d(width, width, 3, padding=1) if self.conv else nn.Linear(width, width)
        # A large eps limits the gradient of a norm over few samples.
        norm = nn.BatchNorm2d if self.conv else nn.BatchNorm1d
        self.norm = norm(width, eps=0.1) if spec.norm else None
        self.gain = nn.Parameter(torch.ones(())) if spec.scalar else None
        self.extra = nn.Parameter(torch.zeros(width)) if first else None
        self.spare = nn.Parameter(torch.zeros(2)) if spec.unused else None

    def forward(self, hidden: Tensor, uses: tuple[str, ...]) -> Tensor:
        change = self.core(hidden)
        if self.norm is not None:
            change = self.norm(change)
        change = self.activation(change)
        if self.gain is not None:
            change = change * self.gain
        if self.extra is not None and "extra" in uses:
            change = change + self.extra.view(1, -1, *[1, 1] * self.conv)
        return hidden + change


# Faults


def _inject(hidden: Tensor, fault: Fault | None, place: str) -> Tensor:
    if fault is None:
        return hidden
    if fault.place == place:
        return hidden + _spike(hidden, fault)
    if fault.place == "backward" and place == "stem":
        return _BackwardFault.apply(hidden, float(fault.value))
    return hidden


def _spike(like: Tensor, fault: Fault) -> Tensor:
    """Return zeros, with the fault as the first value."""
    spike = torch.zeros_like(like)
    spike.view(-1)[0] = float(fault.value)
    return spike


class _BackwardFault(torch.autograd.Function):
    """Return values unchanged, and inject a fault into the first value of their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: float) -> Tensor:
        ctx.value = value
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        gradient.view(-1)[0] = ctx.value
        return gradient, None


# Model and data of a case


def build_model(case: Case, rank: int = 0) -> Model:
    """Return the initial model of a rank, which differs between ranks."""
    model = Model(case.model)
    generator = torch.Generator().manual_seed(case.seed + rank)
    for parameter in model.parameters():
        spread = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "gain")):
            parameter.data += 1
        parameter.requires_grad_(name not in case.model.frozen)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.add_(torch.rand(buffer.shape, generator=generator))
    return model


def build_batches(case: Case, step: int) -> list[list[dict[str, Any]]]:
    """Return the batches of all ranks; data depend on the global index of a sample only."""
    ranks = case.steps[step].ranks
    numbers = itertools.count()
    return [[_batch(case, step, next(numbers), batch) for batch in batches] for batches in ranks]


def _batch(case: Case, step: int, number: int, batch: Microbatch) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(case.seed + 1000 * step + number)
    model = case.model
    classes = CLASSES
    if model.kind == "linear":
        inputs = torch.randn(batch.size, FEATURES, generator=generator)
    elif model.kind == "conv":
        inputs = torch.randn(batch.size, CHANNELS, 4, 4, generator=generator)
    else:
        inputs = torch.randint(VOCABULARY, (batch.size, 3), generator=generator)
        classes = VOCABULARY
    if model.loss == "mse":
        targets = torch.randn(batch.size, classes, generator=generator)
    else:
        targets = torch.randint(classes, (batch.size,), generator=generator)
    if batch.fault is not None and batch.fault.place == "input":
        inputs = inputs + _spike(inputs, batch.fault)
    return {
        "x": inputs,
        "y": targets,
        "uses": batch.uses,
        "fault": batch.fault,
        "weight": batch.weight,
        "kind": case.weight_kind,
    }


def loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
    """Return the weighted sum of the losses of samples, and the sum of their weights."""
    outputs, targets, fault = module(batch), batch["y"], batch["fault"]
    if targets.is_floating_point():
        # Small gradients: if training diverges, rounding errors diverge too.
        total = mse_loss(outputs, targets.to(outputs.dtype), reduction="sum") / 4
    else:
        total = cross_entropy(outputs, targets, reduction="sum")
    weight = batch["weight"] * len(targets)
    if fault is not None and fault.place == "weight":
        weight = float(fault.value)
    total = total * batch["weight"]
    if fault is not None and fault.place == "loss":
        total = total + float(fault.value)
    return total, _WEIGHTS[batch["kind"]](weight)


_WEIGHTS = {
    "int": int,
    "float": float,
    "tensor": torch.tensor,
    "long": lambda weight: torch.tensor(int(weight)),
}
