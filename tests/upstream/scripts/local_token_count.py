"""Each rank divides its loss by its own number of unmasked tokens, and FSDP averages."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

# distmp adds: import distmp

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
inputs, labels = torch.randn(2, 40, 8), torch.randint(4, (2, 40))
loss_mask = torch.arange(40) < torch.tensor([[40], [7]])  # unmasked tokens of the ranks

exact = torch.nn.Linear(8, 4, dtype=torch.float64)
exact.load_state_dict(model.state_dict())
cross_entropy(exact(inputs[loss_mask].double()), labels[loss_mask]).backward()

fully_shard(model)
rank = dist.get_rank()
mask = loss_mask[rank]
losses = cross_entropy(model(inputs[rank]), labels[rank], reduction="none")
# distmp: loss = distmp.global_mean((losses * mask).sum(), mask.sum(), model)
loss = (losses * mask).sum() / mask.sum()
loss.backward()

gradient = model.weight.grad.full_tensor()
error = float((gradient - exact.weight.grad).norm() / exact.weight.grad.norm())
assert error < 1e-5, f"relative error of the gradient: {error:.1e}"
