"""ShardedGradScaler with a fused optimizer: ranks decide alone whether to skip a step."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

# distmp adds: import distmp

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = FullyShardedDataParallel(torch.nn.Linear(8, 4, bias=False), device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
# distmp: scaler = distmp.DistributedGradScaler("cpu", optimizers=[optimizer])
scaler = ShardedGradScaler("cpu")
for step in range(3):
    outputs = model(torch.ones(2, 8)).sum(0)
    overflow = torch.tensor([3e38, 1.0, 1.0, 1.0])  # in the first of the 4 rows, so on rank 0
    loss = (outputs * (overflow if step == 1 else 1.0)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

steps = next(iter(optimizer.state.values()))["step"].item()
found: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
dist.all_gather_object(found, (steps, scaler.get_scale()))
assert found == [(2.0, 2.0**15)] * 2, f"steps and scales of the ranks: {found}"
