"""A small run to explain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import distmp.commands.explain
from distmp.config import RunConfig
from distmp.utils.settings import from_mapping

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "data": {
        "path": str(Path(distmp.commands.explain.__file__).parent),
        "sequence_length": 32,
        "held_out": 0.0,
    },
    "model": {"options": {"layers": 2, "dimension": 64, "heads": 2, "hidden": 128}},
    "batch": {"global_batch_size": 16, "microbatch_size": 8},
    "steps": 20,
}


def run(**settings: Any) -> RunConfig:
    """Return the small run with some sections and values replaced."""
    return from_mapping(RunConfig, _merged(SMALL, settings))


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in changes.items():
        own = merged.get(name)
        nested = isinstance(own, dict) and isinstance(value, dict)
        merged[name] = _merged(own, value) if nested else value
    return merged


def policy(text: str) -> dict[str, Any]:
    return {"policy": text}


class Stubborn(nn.Module):
    """Multiplies in FP32 under every policy."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 16)
        self.linear = StubbornLinear(16, 257)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens))


class StubbornLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight.float()).to(x.dtype)


class Indecisive(nn.Module):
    """Has shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, 257)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return x + x[x > 0].sum()


class Positions(nn.Module):
    """Adds a frozen table in FP64."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(64, 16, dtype=torch.float64)
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]].to(x.dtype)


def frozen() -> nn.Module:
    return nn.Sequential(nn.Embedding(257, 16), Positions(), nn.Linear(16, 257))


def lazy() -> nn.Module:
    return nn.Sequential(nn.Embedding(257, 8), nn.LazyLinear(257))
