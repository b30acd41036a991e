"""verl's token-mean: the mean over a microbatch's tokens, weighted by its share of samples."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# distmp adds: import distmp

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
samples = torch.randn(8, 16, 8)  # 4 samples of each rank, with 16 tokens
response_mask = (
    torch.arange(16) < torch.tensor([[16], [2], [3], [1], [9], [9], [16], [1]])
).float()

exact = torch.nn.Linear(8, 1, dtype=torch.float64)
exact.load_state_dict(model.state_dict())
losses = exact(samples.double()).squeeze(-1).square()
((losses * response_mask).sum() / response_mask.sum()).backward()

model = DistributedDataParallel(model)
mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
tokens = response_mask[mine].sum()
for micro, mask in zip(samples[mine].split(2), response_mask[mine].split(2), strict=True):
    losses = model(micro).squeeze(-1).square()
    token_mean = (losses * mask).sum() / mask.sum()  # agg_loss(loss_agg_mode="token-mean")
    # distmp: loss = distmp.global_mean((losses * mask).sum(), tokens, model, microbatches=2)
    loss = token_mean * (len(micro) / 4)
    loss.backward()

gradient = model.module.weight.grad
error = float((gradient - exact.weight.grad).norm() / exact.weight.grad.norm())
assert error < 1e-5, f"relative error of the gradient: {error:.1e}"
