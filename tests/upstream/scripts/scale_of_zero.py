"""GradScaler lowers the scale to 0 in a row of bad batches; the next good batch is lost, too."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# distmp adds: import distmp

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
# distmp: scaler = distmp.DistributedGradScaler("cpu", optimizers=[optimizer], hysteresis=200)
scaler = torch.amp.GradScaler("cpu")
before = model.module.weight.detach().clone()
for step in range(170):
    inputs = torch.full((4, 8), float("nan")) if step < 169 else torch.ones(4, 8)
    loss = model(inputs).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

update = model.module.weight.detach() - before
assert torch.allclose(update, torch.tensor(-1e-2)), f"update of the good batch: {update}"
