"""Measure the error of accumulated gradients: `python -m benchmarks.accumulation_error`.

Two ranks over gloo run 8, 64 and 512 microbatches each through a small model with bfloat16 weights,
with each method in turn. The reference sums the same bfloat16 microbatch gradients in float64, so
the difference is only the error of accumulation and reduction. Errors are relative L2 errors of the
full gradient. With `--device cuda` the two ranks share a GPU.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.device import parser
from benchmarks.ranks import Ranks, is_rank, largest, serve
from benchmarks.report import machine, save, sized
from benchmarks.tables import accumulation
from distmp import Fp32GradBuckets
from distmp.distributed.world import World

COUNTS = sized((8, 64, 512), (8,))
RANKS = 2
WIDTH = 32


class Batch(NamedTuple):
    """One microbatch, bfloat16, shape (8, WIDTH) both."""

    inputs: Tensor
    targets: Tensor


def make_model(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the same model in every call; its weights have bfloat16 values in any dtype."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    return model.bfloat16().to(device, dtype)


def make_batches(count: int, rank: int, device: torch.device) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(count, 8, WIDTH, generator=generator).to(device, torch.bfloat16)
    # Targets far from the model's outputs, so that gradients of microbatches have a common
    # direction, as they do early in training.
    return [Batch(part, (part.float().roll(1, 1) + 1).bfloat16()) for part in inputs]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch.inputs), batch.targets)


def reference(batches: Sequence[Batch]) -> list[Tensor]:
    """Return the float64 sum over microbatches and ranks of the bfloat16 gradients."""
    model = make_model(batches[0].inputs.device, torch.bfloat16)
    parameters = list(model.parameters())
    total = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    for batch in batches:
        gradients = torch.autograd.grad(loss(model, batch), parameters)
        assert all(gradient.dtype == torch.bfloat16 for gradient in gradients)
        torch._foreach_add_(total, [gradient.double() for gradient in gradients])
    for one in total:
        dist.all_reduce(one)
    return total


# Each method returns the sum of the gradients over microbatches and ranks.


def ddp(batches: Sequence[Batch], *, every: bool) -> list[Tensor]:
    """Use torch's DDP on a bfloat16 model, reducing in every microbatch or in the last one."""
    model = DistributedDataParallel(make_model(batches[0].inputs.device, torch.bfloat16))
    for index, batch in enumerate(batches):
        model.require_backward_grad_sync = every or index == len(batches) - 1
        loss(model, batch).backward()
    return _summed(model)


def fsdp1(batches: Sequence[Batch]) -> list[Tensor]:
    """Use FSDP1 with bfloat16 parameters, reduced in FP32 in the last microbatch."""
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    device = batches[0].inputs.device
    model = FullyShardedDataParallel(
        make_model(device), mixed_precision=mixed, use_orig_params=True, device_id=device
    )
    with model.no_sync():
        for batch in batches[:-1]:
            loss(model, batch).backward()
    loss(model, batches[-1]).backward()
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        return [gradient.clone() for gradient in _summed(model)]


def fsdp2(batches: Sequence[Batch], policy: MixedPrecisionPolicy, *, every: bool) -> list[Tensor]:
    """Use FSDP2, reducing in every microbatch or in the last one."""
    model = make_model(batches[0].inputs.device)
    sharded = fully_shard(model, mp_policy=policy)
    for index, batch in enumerate(batches):
        sharded.set_requires_gradient_sync(every or index == len(batches) - 1)
        loss(model, batch).backward()
    return _summed(model)


def buckets(batches: Sequence[Batch], **options: Any) -> list[Tensor]:
    """Use distmp's buckets on a bfloat16 model."""
    model = make_model(batches[0].inputs.device, torch.bfloat16)
    grads = Fp32GradBuckets(model.named_parameters(), dist.group.WORLD, **options)
    grads.begin_step()
    for index, batch in enumerate(batches):
        grads.begin_microbatch(last=index == len(batches) - 1)
        loss(model, batch).backward()
        grads.end_microbatch()
    grads.finish()
    return [grads.gradients()[name] for name, _ in model.named_parameters()]


def _summed(model: nn.Module) -> list[Tensor]:
    """Return gradients that were averaged over ranks as full sums."""
    gradients = [cast(Tensor, parameter.grad) for parameter in model.parameters()]
    full = [part.full_tensor() if isinstance(part, DTensor) else part for part in gradients]
    return [gradient * RANKS for gradient in full]


def _accelerate_policy() -> MixedPrecisionPolicy:
    """Return accelerate's FSDP2 policy for mixed_precision="bf16"; it does not shard on CPUs."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    return cast(MixedPrecisionPolicy, plugin.mixed_precision_policy)


_FP32_REDUCE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

METHODS: dict[str, Callable[[Sequence[Batch]], list[Tensor]]] = {
    "torch DDP, bf16 parameters, reduced once": lambda b: ddp(b, every=False),
    "torch DDP, bf16 parameters, reduced every microbatch": lambda b: ddp(b, every=True),
    "FSDP1, bf16 compute, fp32 reduce, reduced once": fsdp1,
    "FSDP2, accelerate's bf16 policy, reduced once": lambda b: fsdp2(
        b, _accelerate_policy(), every=False
    ),
    "FSDP2, accelerate's bf16 policy, reduced every microbatch": lambda b: fsdp2(
        b, _accelerate_policy(), every=True
    ),
    "FSDP2, fp32 reduce, reduced once": lambda b: fsdp2(b, _FP32_REDUCE, every=False),
    "FSDP2, fp32 reduce, reduced every microbatch": lambda b: fsdp2(b, _FP32_REDUCE, every=True),
    "distmp.Fp32GradBuckets": buckets,
    "distmp.Fp32GradBuckets, reduce_dtype=bfloat16": lambda b: buckets(
        b, reduce_dtype=torch.bfloat16
    ),
    "distmp.Fp32GradBuckets, reproducible=True": lambda b: buckets(b, reproducible=True),
}


class Rank:
    """Measures the errors of the methods on one rank."""

    def __init__(self, world: World) -> None:
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about FSDP1
        self._batches = [make_batches(count, world.rank, world.device) for count in COUNTS]
        self._exact = [_flat(reference(batches)) for batches in self._batches]

    def measure(self, method: str) -> list[float]:
        """Return the errors of a method, one per entry of COUNTS."""
        errors = []
        for batches, exact in zip(self._batches, self._exact, strict=True):
            errors.append(((_flat(METHODS[method](batches)) - exact).norm() / exact.norm()).item())
        return errors


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.detach().double().flatten() for part in parts])


def main() -> int:
    if is_rank():
        return serve(lambda _, world: Rank(world).measure)
    device = parser(__doc__).parse_args().device
    errors: dict[str, list[float]] = {}
    with Ranks("benchmarks.accumulation_error", "all", RANKS, device=device.type) as ranks:
        for method in METHODS:
            measured = largest(method, ranks, method)
            if measured is not None:
                errors[method] = measured
    result = {
        "machine": machine(device),
        "ranks": RANKS,
        "microbatches": COUNTS,
        "relative_error": errors,
    }
    path = save(f"accumulation-error-{device.type}", result)
    print(accumulation.accumulation_error(result))
    print(f"saved to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
