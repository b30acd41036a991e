# %% [markdown]
# # How wrong is a mean of means?
#
# Microbatches have different numbers of tokens. Training loops average the mean losses of
# microbatches and ranks. How far is this gradient from that of the mean over all tokens?

# %% tags=["remove-output"]
# %pip install --quiet distmp matplotlib

# %%
import contextlib
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.functional import cross_entropy
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
# ## Two ranks with two microbatches each
#
# Each list has the numbers of tokens of the microbatches of one rank. Change them: with equal
# numbers, the error is zero up to rounding. A token is a character of the text.

# %%
TOKENS = [[60, 12], [48, 20]]
TEXT = """Four score and seven years ago our fathers brought forth on this continent, a new
nation, conceived in Liberty, and dedicated to the proposition that all men are created equal."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(128, 16), nn.Linear(16, 128))


def microbatches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens of each microbatch, and for each token the next one to predict."""
    tokens = torch.tensor([*TEXT.encode()])
    start = sum(map(sum, TOKENS[:rank]))
    found = []
    for count in TOKENS[rank]:
        found.append((tokens[start : start + count], tokens[start + 1 : start + count + 1]))
        start += count
    return found


# %% [markdown]
# ## The reference
#
# One process, all tokens, float64.


# %%
def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


exact = build().double()
everything = [batch for rank in range(2) for batch in microbatches(rank)]
inputs, labels = (torch.cat(parts) for parts in zip(*everything, strict=True))
cross_entropy(exact(inputs), labels).backward()
expected = flat_gradient(exact)

# %% [markdown]
# ## The loop, with both losses


# %%
def step(uses_global_mean: bool) -> list[float]:
    """Return the gradient of one step under DDP."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build())
    batches = microbatches(dist.get_rank())
    tokens = sum(len(labels) for _, labels in batches)
    for index, (inputs, labels) in enumerate(batches):
        last = index == len(batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            if uses_global_mean:
                loss_sum = cross_entropy(model(inputs), labels, reduction="sum")
                loss = distmp.global_mean(loss_sum, tokens, model, microbatches=len(batches))
            else:
                loss = cross_entropy(model(inputs), labels) / len(batches)
            loss.backward()
    dist.destroy_process_group()
    return flat_gradient(model).tolist()


errors = {}
for name, uses_global_mean in (("mean of means", False), ("global_mean", True)):
    found = torch.tensor(on_two_ranks(step, uses_global_mean)[0], dtype=torch.float64)
    errors[name] = float((found - expected).norm() / expected.norm())
    ratio = float(found.norm() / expected.norm())
    cosine = float(found @ expected / found.norm() / expected.norm())
    print(
        f"{name}: error of the gradient {errors[name]:.3g}; its norm is {ratio:.3f} times that of "
        f"the exact gradient, the cosine between them {cosine:.3f}"
    )

# %% [markdown]
# ## Why
#
# In a mean of means each microbatch counts a quarter, whatever its length. So a token of the
# shortest microbatch counts 60 / 12 = 5 times as much as one of the longest.

# %%
counts = [count for rank in TOKENS for count in rank]
names = [f"rank {r}\n{count} tokens" for r, rank in enumerate(TOKENS) for count in rank]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
shares = [100 / len(counts) / count for count in counts]
left.bar(names, shares, color="tab:red", label="mean of means")
left.axhline(100 / sum(counts), color="tab:blue", label="mean over all tokens")
left.set(title="weight of one token of the microbatch, percent")
left.legend(fontsize="small")
bars = right.bar(list(errors), list(errors.values()), color=["tab:red", "tab:blue"])
right.bar_label(bars, [f"{error:.3g}" for error in errors.values()])
right.set(title="error of the gradient, relative to float64", yscale="log", ylim=(1e-9, 10))
figure.savefig("mean_of_means.png")

# %% [markdown]
# The learning rate does not correct it: the cosine is below 1, so the direction of the gradient is
# wrong. Data with padding,
# packed sequences, or masked prompts have such microbatches in every step.
#
# ## The fix
#
# Pass the loss *sum* of the microbatch, and the number of tokens of the whole step on this rank.
# `global_mean` returns the loss whose gradient is that of the mean over all tokens of all ranks:
#
# ```py
# loss = distmp.global_mean(loss_sum, tokens, model, microbatches=len(batches))
# ```
#
# Read on: [the global mean](../global-mean.md) for FSDP, tensor parallelism and trainers,
# [is my gradient right?](../testing.md) to measure this error in your own loop.
