"""FSDP2 with reduce_dtype=float32 adds the partial gradients of tensor parallelism in bfloat16."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

# distmp adds: from distmp.parallel.matrices import apply_reduce_dtype

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
norm = torch.nn.LayerNorm(64)
inputs = torch.randn(2, 32, 64)
parallelize_module(norm, mesh["tp"], SequenceParallel(sequence_dim=1))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(norm, mesh=mesh["dp"], mp_policy=policy)
# distmp adds: apply_reduce_dtype(norm)
partial: list[torch.Tensor] = []  # the gradients that the ranks sum, in bfloat16


def record(gradient: torch.Tensor) -> None:
    partial.append(gradient.to_local().double())


norm.register_forward_pre_hook(lambda module, _: module.weight.register_hook(record) and None)
norm(distribute_tensor(inputs, mesh["tp"], [Shard(1)])).square().sum().backward()
exact = partial[0].clone()
dist.all_reduce(exact)
gradient = norm.weight.grad.full_tensor().double()
error = float((gradient - exact).norm() / exact.norm())
assert error < 1e-6, f"relative error of the sum over ranks: {error:.1e}"
