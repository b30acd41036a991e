"""The mean loss of every microbatch and rank counts the same, whatever its number of tokens."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

# distmp adds: import distmp

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
lengths = [[60, 12], [48, 20]]  # tokens of the microbatches of each rank
batches = [[(torch.randn(n, 8), torch.randint(4, (n,))) for n in rank] for rank in lengths]

exact = torch.nn.Linear(8, 4, dtype=torch.float64)
exact.load_state_dict(model.state_dict())
inputs = torch.cat([inputs for rank in batches for inputs, _ in rank])
labels = torch.cat([labels for rank in batches for _, labels in rank])
cross_entropy(exact(inputs.double()), labels).backward()

fully_shard(model)
microbatches = batches[dist.get_rank()]
tokens = sum(len(labels) for _, labels in microbatches)
for inputs, labels in microbatches:
    losses = cross_entropy(model(inputs), labels, reduction="none")
    # distmp: loss = distmp.global_mean(losses.sum(), tokens, model, microbatches=2)
    loss = losses.mean() / len(microbatches)
    loss.backward()

gradient = model.weight.grad.full_tensor()
error = float((gradient - exact.weight.grad).norm() / exact.weight.grad.norm())
assert error < 1e-5, f"relative error of the gradient: {error:.1e}"
