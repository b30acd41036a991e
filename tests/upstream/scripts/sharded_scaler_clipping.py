"""ShardedGradScaler, a fused optimizer and clipping: an error at the first step."""

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
loss = model(torch.ones(2, 8)).sum()
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
norm = model.clip_grad_norm_(1.0).item()
scaler.step(optimizer)
scaler.update()
assert abs(norm - 32**0.5 * 2) < 1e-4, f"norm of the gradient: {norm}"
