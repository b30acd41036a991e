"""The dtype in which FSDP2 reduces gradients over tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from distmp.errors import ConfigError, SetupError
from distmp.parallel.fsdp_internals import _groups
from distmp.parallel.matrices import apply_reduce_dtype
from tests.ranks import ranks

WIDTH, LENGTH = 64, 32
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def inputs(data_rank: int) -> tuple[Tensor, Tensor]:
    """Return input and output gradient of the norm, for whole sequences."""
    generator = torch.Generator().manual_seed(data_rank)
    shape = (2, LENGTH, WIDTH)
    return tuple(torch.randn(shape, generator=generator).bfloat16() for _ in range(2))


def partial_gradients(data_rank: int, part: int) -> list[Tensor]:
    """Return what autograd computes on one rank, in BF16, for its part of the sequences."""
    norm = nn.LayerNorm(WIDTH).bfloat16()
    batch, gradient = (t.chunk(2, dim=1)[part] for t in inputs(data_rank))
    norm(batch).backward(gradient)
    return [p.grad for p in norm.parameters()]


def exact() -> Tensor:
    """Return the sum over tensor-parallel ranks, averaged over data-parallel ones, in float64."""
    total = [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(2)]
    for data_rank in range(2):
        for part in range(2):
            for sum_, partial in zip(total, partial_gradients(data_rank, part), strict=True):
                sum_ += partial.double() / 2
    return torch.cat(total)


def sharded() -> tuple[nn.Module, Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.LayerNorm(WIDTH))
    parallelize_module(model, mesh["tp"], {"0": SequenceParallel(use_local_output=True)})
    fully_shard(model, mesh=mesh["dp"], mp_policy=POLICY)
    batch, gradient = inputs(mesh.get_local_rank("dp"))
    part = mesh.get_local_rank("tp")
    return model, batch.chunk(2, dim=1)[part], gradient.chunk(2, dim=1)[part]


def gradient_error(model: nn.Module, batch: Tensor, gradient: Tensor, repeated: int = 1) -> float:
    """Return the relative error of the gradients of a step with equal microbatches."""
    assert isinstance(model, FSDPModule)
    model.zero_grad()
    for index in range(repeated):
        model.set_requires_gradient_sync(index == repeated - 1)
        model(batch).backward(gradient)
    found = torch.cat([p.grad.full_tensor().double() for p in model.parameters()]) / repeated
    return float((found - exact()).norm() / exact().norm())


@ranks(4)
def test_tensor_parallel_ranks_reduce_in_the_reduce_dtype() -> None:
    step = sharded()
    # A torch that reduces in FP32 itself makes the function superfluous.
    assert gradient_error(*step) > 5e-4
    for _ in range(2):  # calling it again changes nothing
        apply_reduce_dtype(step[0])
        assert gradient_error(*step) < 1e-7
        assert gradient_error(*step, repeated=3) < 1e-7


@ranks(1)
def test_apply_reduce_dtype_refuses_unsupported_models() -> None:
    with pytest.raises(ConfigError, match="has no reduce dtype to apply"):
        apply_reduce_dtype(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="has no reduce dtype to apply"):
        apply_reduce_dtype(fully_shard(nn.Linear(2, 2)))
    model = fully_shard(nn.Linear(2, 2), mp_policy=POLICY)
    next(_groups(model)).fsdp_params[0] = object()
    with pytest.raises(SetupError, match=r"has no object.accumulate_unsharded_grad_if_needed"):
        apply_reduce_dtype(model)
