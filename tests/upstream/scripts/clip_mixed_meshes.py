"""Clipping the common norm of gradients that are DTensors on two meshes: an error."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

# distmp adds: import distmp


def build(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(0)
    parts = {name: nn.Linear(4, 4, bias=False) for name in ("dense", "expert")}
    return nn.ModuleDict(parts).to(dtype)


def loss(model: nn.ModuleDict, inputs: Tensor) -> Tensor:
    return sum(10 * part(inputs).square().mean() for part in model.values())


if not dist.is_initialized():
    dist.init_process_group("gloo")
exact, model, inputs = build(torch.float64), build(torch.float32), torch.randn(6, 4)
loss(exact, inputs.double()).backward()
torch.nn.utils.clip_grad_norm_(exact.parameters(), 1.0)

fully_shard(model["dense"], mesh=init_device_mesh("cpu", (2,)))
fully_shard(
    model["expert"], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ep"))["dp"]
)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
loss(model, inputs).backward()
# distmp adds: scaler = distmp.DistributedGradScaler("cpu", enabled=False)
# distmp: scaler.clip_grad_norm_(optimizer, 1.0)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

for name, part in model.items():
    difference = part.weight.grad.full_tensor() - exact[name].weight.grad
    error = float(difference.norm() / exact[name].weight.grad.norm())
    assert error < 1e-5, f"relative error of the clipped gradient: {error:.1e}"
