"""GradScaler under DDP: an overflow in a parameter that DDP ignores, on one rank."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# distmp adds: import distmp


class WithExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(8, 4), nn.Linear(4, 1)
        self._ddp_params_and_buffers_to_ignore = ["expert.weight", "expert.bias"]

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.shared(inputs)
        return hidden, self.expert(hidden.detach())


if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = WithExpert()
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
# distmp: scaler = distmp.DistributedGradScaler("cpu", optimizers=[optimizer])
scaler = torch.amp.GradScaler("cpu")
for step in range(3):
    hidden, of_expert = wrapped(torch.randn(4, 8))
    overflows = step == 1 and dist.get_rank() == 1
    loss = hidden.square().mean() + of_expert.mean() * (3e38 if overflows else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()

found: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
dist.all_gather_object(found, (scaler.get_scale(), model.shared.weight.sum().item()))
assert found[0] == found[1], f"scale and replicated weight of the ranks: {found}"
assert found[0][0] == 2.0**15, f"scale: {found[0][0]}"
