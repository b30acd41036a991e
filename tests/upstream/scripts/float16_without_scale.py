"""FSDP2 with float16 and without a loss scale: small gradients round to zero."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# distmp adds: import distmp

if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
inputs = torch.randn(2, 16, 8)  # a batch of each rank
exact = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).double()
exact.load_state_dict(model.state_dict())


def loss_sum(module: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return (module(batch) * 1e-8).sum(), len(batch)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e8)


def step(module: nn.Module, batch: Tensor) -> None:
    total, weight = loss_sum(module, batch)
    (total / weight).backward()
    sgd(list(module.parameters())).step()


before = exact[1].weight.detach().clone()
step(exact, inputs.flatten(0, 1).double())
# distmp: engine = distmp.Engine(model, loss_sum, sgd, policy="fp16", strategy="fsdp")
fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))
# distmp: engine.step([inputs[dist.get_rank()]])
step(model, inputs[dist.get_rank()])

update = model[1].weight.detach().full_tensor() - before
wanted = exact[1].weight.detach() - before
error = float((update - wanted).norm() / wanted.norm())
assert error < 1e-2, f"relative error of the update: {error:.1e}"
