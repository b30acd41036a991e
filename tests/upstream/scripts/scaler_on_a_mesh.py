"""GradScaler and DTensors: the flag is reduced over the placements of the first gradient only."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

# distmp adds: import distmp

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
norm = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
weight = torch.nn.Parameter(distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)]))
optimizer = torch.optim.SGD([norm, weight], lr=1e-2)  # the norm comes first
# distmp: scaler = distmp.DistributedGradScaler("cpu", optimizers=[optimizer])
scaler = torch.amp.GradScaler("cpu")
for step in range(3):
    inputs = distribute_tensor(torch.randn(8), mesh, [Replicate()])
    factors = torch.tensor([1.0, 1.0, 1.0, 3e38 if step == 1 else 1.0])  # a row of rank 1
    rows = (weight @ inputs) * distribute_tensor(factors, mesh, [Shard(0)])
    loss = rows.sum().full_tensor() + norm.square().sum().full_tensor()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

found: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
dist.all_gather_object(found, (scaler.get_scale(), norm.to_local().sum().item()))
assert found[0] == found[1], f"scale and replicated weight of the ranks: {found}"
