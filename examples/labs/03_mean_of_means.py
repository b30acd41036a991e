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


def on_ranks(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of a function on some ranks. They are processes over gloo."""
    config = LaunchConfig(
        *(1, 1, count),  # one machine with this number of processes
        run_id="lab",
        max_restarts=0,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
    )
    results = elastic_launch(config, function)(*args)
    return [results[rank] for rank in range(count)]


# %% [markdown]
# ## Two ranks with two microbatches each
#
# Each list has the numbers of tokens of the microbatches of one rank. Change them: with equal
# numbers, the error is zero up to rounding. An additional list adds a rank. All ranks need the same
# number of microbatches; a rank with fewer gets additional ones of 0 tokens. A token is a character
# of the text.

# %%
TOKENS = [[60, 12], [48, 20]]
TEXT = """Four score and seven years ago our fathers brought forth on this continent, a new
nation, conceived in Liberty, and dedicated to the proposition that all men are created equal."""
RANKS = len(TOKENS)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(128, 16), nn.Linear(16, 128))


def microbatches(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens of each microbatch, and for each token the next one to predict."""
    tokens = torch.tensor([*TEXT.encode()])
    start = sum(map(sum, TOKENS[:rank]))
    found = []
    for count in TOKENS[rank]:
        places = torch.arange(start, start + count)  # after the end, from the beginning again
        found.append((tokens[places % len(tokens)], tokens[(places + 1) % len(tokens)]))
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
everything = [batch for rank in range(RANKS) for batch in microbatches(rank)]
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
            loss_sum = cross_entropy(model(inputs), labels, reduction="sum")
            if uses_global_mean:
                loss = distmp.global_mean(loss_sum, tokens, model, microbatches=len(batches))
            else:
                loss = loss_sum / max(len(labels), 1) / len(batches)
            loss.backward()
    gradient = flat_gradient(model).tolist()
    # Frees DDP before its process group, because a rank could hang otherwise.
    del model, loss, loss_sum
    dist.destroy_process_group()
    return gradient


errors = {}
for name, uses_global_mean in (("mean of means", False), ("global_mean", True)):
    found = torch.tensor(on_ranks(RANKS, step, uses_global_mean)[0], dtype=torch.float64)
    errors[name] = float((found - expected).norm() / expected.norm())
    ratio = float(found.norm() / expected.norm())
    cosine = float(found @ expected / found.norm() / expected.norm())
    print(
        f"{name}: error of the gradient {errors[name]:.3g};\n"
        f"  its norm is {ratio:.3f} times that of the exact gradient, their cosine {cosine:.3f}"
    )

# %% [markdown]
# ## Why
#
# In a mean of means all microbatches count the same, whatever their length. With the numbers above,
# a token of the shortest one counts 60 / 12 = 5 times as much as one of the longest.

# %%
counts = [count for rank in TOKENS for count in rank]
names = [f"rank {r}\n{count} tokens" for r, rank in enumerate(TOKENS) for count in rank]
shares = [100 / len(counts) / count if count else 0.0 for count in counts]
# In a mean of means, a token of a short microbatch has a larger weight than one of a long one, and
# the gradient a large error. With global_mean, the error is that of float32.
figure, (upper, lower) = plt.subplots(2, figsize=(7, 6), layout="constrained")
upper.bar(range(len(counts)), shares, tick_label=names, color="tab:red", label="mean of means")
upper.axhline(100 / sum(counts), color="tab:blue", label="mean over all tokens")
upper.set(title="weight of one token of the microbatch, percent")
upper.legend(fontsize="small")
bars = lower.bar(list(errors), list(errors.values()), color=["tab:red", "tab:blue"])
lower.bar_label(bars, [f"{error:.3g}" for error in errors.values()])
lower.set(title="error of the gradient, relative to float64", yscale="log", ylim=(1e-9, 10))
figure.savefig("mean_of_means.png")

# %% [markdown]
# The learning rate does not correct it: the cosine is below 1, so the direction of the gradient is
# wrong. Data with padding, packed sequences, or masked prompts have such microbatches in each step.
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
