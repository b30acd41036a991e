# %% [markdown]
# # What happens if one rank overflows?
#
# Two ranks train one model in float16. On one of them, one gradient is inf. Do both skip the step?

# %% tags=["remove-output"]
# %pip install --quiet distmp matplotlib

# %%
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

import distmp

torch.set_num_threads(1)  # forked processes cannot use the threads of this one


def on_two_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of a function on two ranks. They are processes over gloo."""
    config = LaunchConfig(
        *(1, 1, 2),  # one machine with two processes
        run_id="lab",
        max_restarts=0,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
    )
    results = elastic_launch(config, function)(*args)
    return [results[0], results[1]]


# %% [markdown]
# ## A model with experts
#
# In a mixture of experts, all ranks have a copy of the shared layers, and each rank has experts of
# its own. DDP averages the gradients of the shared layers only.


# %%
class Mixture(nn.Module):
    """A shared layer, and an expert that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.expert = nn.Linear(16, 16), nn.Linear(16, 1)
        nn.init.normal_(self.expert.weight, std=0.01)
        self._ddp_params_and_buffers_to_ignore = ["expert.weight", "expert.bias"]

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.expert(torch.tanh(self.shared(inputs)))
        return output.float()


# %% [markdown]
# ## The training loop
#
# This is the usual loop with a scaler. In step 10, the targets of rank 1 are outliers: the gradient
# of its expert, times the loss scale, is larger than the largest float16 number, 65504. All other
# gradients stay finite. The outliers only cause an overflow in this lab; in a run, any overflow of
# an expert has this effect.

# %%
STEPS, BAD_STEP = 30, 10


def train(name: str) -> tuple[list[float], list[list[float]]]:
    """Train on this rank; return the loss scale and the shared weights after each step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same shared weights on both ranks
    model = Mixture()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if name == "torch":
        scaler = torch.amp.GradScaler("cpu")
    else:
        scaler = distmp.DistributedGradScaler("cpu", optimizers=[optimizer])
    torch.manual_seed(1 + dist.get_rank())  # different data
    scales, weights = [], []
    for step in range(1, STEPS + 1):
        inputs = torch.randn(64, 16)
        targets = inputs.mean(dim=1, keepdim=True)
        if step == BAD_STEP and dist.get_rank() == 1:
            targets += 2
        with torch.autocast("cpu", torch.float16):
            loss = (wrapped(inputs) - targets).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        weights.append(model.shared.weight.flatten().tolist())
    del wrapped, loss  # frees DDP before its process group, because a rank could hang otherwise
    dist.destroy_process_group()
    return scales, weights


# %%
scales, differences = {}, {}
for name in ("torch", "distmp"):
    ranks = on_two_ranks(train, name)
    scales[name] = [rank[0] for rank in ranks]
    first, second = (torch.tensor(rank[1]) for rank in ranks)
    differences[name] = (first - second).abs().amax(dim=1)
    print(
        f"{name}: loss scales {scales[name][0][-1]:.0f} and {scales[name][1][-1]:.0f},\n"
        f"  largest difference of the shared weights {differences[name][-1]:.2g}, "
        f"{differences[name][-1] / first[-1].abs().max():.1%} of the largest weight"
    )

# %%
# With torch, the loss scale of rank 1 halves in step 10 and that of rank 0 does not; from then on,
# their shared weights differ. With distmp, both scales halve, and the difference stays 0.
figure, (upper, lower) = plt.subplots(2, figsize=(7, 6), layout="constrained")
steps = range(1, STEPS + 1)
for name, style in (("torch", {"linewidth": 4, "alpha": 0.5}), ("distmp", {"linestyle": "--"})):
    for rank in range(2):
        upper.plot(steps, scales[name][rank], label=f"{name}, rank {rank}", **style)
    lower.plot(steps, differences[name], label=name, **style)
upper.set(title="loss scale", xlabel="step", yscale="log")
upper.set_yticks([2**15, 2**16], ["2^15", "2^16"], minor=False)
upper.minorticks_off()
lower.set(title="largest difference of the shared weights", xlabel="step")
upper.legend(fontsize="small")
lower.legend(fontsize="small")
figure.savefig("one_rank_overflows.png")

# %% [markdown]
# ## Why
#
# torch's scaler looks for inf in the gradients of its own rank. Under plain DDP that is enough,
# because the average of inf and any number is inf on all ranks. The gradient of an expert is not
# averaged. So rank 1 skips the step, and rank 0 applies it. From then on, the ranks have different
# "shared" weights and different loss scales, and DDP averages gradients that do not belong
# together. No error is raised.
#
# Try it: remove the line with `_ddp_params_and_buffers_to_ignore`. DDP then averages the gradients
# of the expert, too, and both scalers agree.
#
# Experts are one cause. Under FSDP2 with several meshes, torch's scaler sums its flag only over the
# mesh of the first gradient, with the same effect.
#
# ## The fix
#
# `DistributedGradScaler` sums the flag over all ranks, with one all-reduce of eight numbers per
# step. Replace the line that creates the scaler; all other calls stay:
#
# ```py
# scaler = distmp.DistributedGradScaler("cuda", optimizers=[optimizer])
# ```
#
# Read on: [the scaler](../scaler.md) describes its calls and meshes,
# [concepts](../concepts.md#the-step-decision) the decision that all ranks share.
