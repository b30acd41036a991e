"""Small tensors of each kind in a training state, different in every step, and checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distmp.checkpoint import saving


def values(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(6, 5, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "step": torch.tensor(step),
    }


def sharded(tensors: dict[str, Tensor], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    if mesh is None:
        return tensors
    return tensors | {"weight": distribute_tensor(tensors["weight"], mesh, [Shard(0)])}


def zeros(mesh: DeviceMesh | None = None) -> dict[str, Tensor]:
    return sharded({name: torch.zeros_like(value) for name, value in values(1).items()}, mesh)


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(whole(found)[name], value) for name, value in expected.items())


def save(directory: Path, step: int, mesh: DeviceMesh | None = None) -> None:
    numbers = {"step": step, "samples": 8 * step}
    saving.save(directory, step, sharded(values(step), mesh), numbers, keep=2)
