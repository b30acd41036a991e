# %% [markdown]
# # What does a sum in bfloat16 lose?
#
# The gradient of a step is a sum over microbatches. With bfloat16 parameters, `.grad` is bfloat16,
# too: 8 significant bits, of which 7 are stored. How far is this sum from the true one?

# %% tags=["remove-output"]
# %pip install --quiet distmp matplotlib

# %%
import copy

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import distmp

# %% [markdown]
# ## A model in bfloat16
#
# Replace it with your own model. `loss` returns the loss sum of a microbatch. `MICROBATCHES` can be
# any number from 1.

# %%
MICROBATCHES = 64
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).bfloat16()
microbatches = [torch.randn(8, 64, dtype=torch.bfloat16) for _ in range(MICROBATCHES)]


def loss(model: nn.Module, inputs: Tensor) -> Tensor:
    outputs: Tensor = model(inputs).float()
    return (outputs - inputs[:, :8].float() - 1).square().sum()


# %% [markdown]
# ## Three sums of the same gradients
#
# The gradient of one microbatch is bfloat16 in all cases. Only the sum differs: each function sets
# the same seed, so dropout masks are equal.


# %%
def in_float64(count: int) -> Tensor:
    """Return the sum of the gradients of the first microbatches, without rounding."""
    torch.manual_seed(0)
    parameters = list(model.parameters())
    each = (torch.autograd.grad(loss(model, x), parameters) for x in microbatches[:count])
    sums = [torch.stack(found).double().sum(dim=0) for found in zip(*each, strict=True)]
    return torch.cat([total.flatten() for total in sums])


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def in_grad(count: int) -> tuple[Tensor, int]:
    """Return the sum in `.grad`, as in a plain loop, and the bytes that it takes."""
    torch.manual_seed(0)
    own = copy.deepcopy(model)
    for inputs in microbatches[:count]:
        loss(own, inputs).backward()
    found = flat_gradient(own)
    return found, found.nbytes


def in_buckets(count: int) -> tuple[Tensor, int]:
    """Return the sum in FP32 buckets, and the bytes that they take."""
    torch.manual_seed(0)
    own = copy.deepcopy(model)
    buckets = distmp.Fp32GradBuckets(own.named_parameters(), group=None)
    buckets.begin_step()
    for index, inputs in enumerate(microbatches[:count]):
        buckets.begin_microbatch(last=index == count - 1)
        value = loss(own, inputs)
        with buckets.backward_context(value):
            value.backward()
        buckets.end_microbatch()
    buckets.finish()
    return flat_gradient(own), sum(buffer.nbytes for buffer in buckets.buffers)


counts = sorted({MICROBATCHES, *(2**power for power in range(MICROBATCHES.bit_length()))})
errors: dict[str, list[float]] = {"bfloat16 .grad": [], "FP32 buckets": []}
memory: dict[str, float] = {}
parameters = sum(parameter.numel() for parameter in model.parameters())
for count in counts:
    expected = in_float64(count)
    for name, method in (("bfloat16 .grad", in_grad), ("FP32 buckets", in_buckets)):
        found, nbytes = method(count)
        errors[name].append(float((found - expected).norm() / expected.norm()))
        memory[name] = nbytes / parameters

# %%
print("error after microbatches:", *errors, sep="  ")
for index, count in enumerate(counts):
    in_bfloat16, in_float32 = (values[index] for values in errors.values())
    print(f"{count:24}  {in_bfloat16:14.1e}  {in_float32:12.1e}")
for name, size in memory.items():
    print(f"{name}: {size:.1f} bytes per parameter")

# %% [markdown]
# The picture also has FP32 sums by hand: after each backward, they are in memory beside the `.grad`
# of all parameters. Errors below 1e-9 are drawn as 1e-9.

# %%
memory = {
    "bfloat16 .grad": memory["bfloat16 .grad"],
    "FP32 sums\nbeside .grad": 4 + memory["bfloat16 .grad"],
    "FP32 buckets": memory["FP32 buckets"],
}
# The error of the sum in bfloat16 grows with the number of microbatches; that of FP32 buckets stays
# far below. Gradients take 2 bytes per parameter in bfloat16, 6 with FP32 sums beside them, and 4
# with buckets.
figure, (upper, lower) = plt.subplots(2, figsize=(7, 6), layout="constrained")
for name, values in errors.items():
    upper.plot(counts, [max(value, 1e-9) for value in values], "o-", label=name)
upper.set(title="error of the sum, relative to float64", xlabel="microbatches", yscale="log")
upper.set_xscale("log", base=2)
upper.legend(fontsize="small")
bars = lower.bar(list(memory), list(memory.values()), color=["tab:blue", "0.6", "tab:orange"])
lower.bar_label(bars, fmt="%.1f")
lower.set(title="gradients: bytes per parameter", ylim=(0, 7))
figure.savefig("fp32_buckets.png")

# %% [markdown]
# ## Why
#
# A sum of many gradients is larger than one of them. bfloat16 rounds it to 8 bits after each
# addition, and what the next gradient adds below the last bit is rounded away. The error grows with
# the number of microbatches. An FP32 sum has 24 bits.
#
# ## The fix
#
# Buckets hold the FP32 sums, and no gradient beside them: a hook adds each gradient to its bucket
# during backward, and frees it. They take 2 bytes per parameter more than `.grad` in bfloat16.
#
# The sums alone do not train: AdamW refuses FP32 gradients of bfloat16 weights, and 8 bits are too
# few for small updates of a weight. The policy `bf16` of `distmp.Engine` has the buckets, and FP32
# weights for the optimizer:


# %%
def loss_and_weight(model: nn.Module, inputs: Tensor) -> tuple[Tensor, int]:
    return loss(model, inputs), len(inputs)


engine = distmp.Engine(
    copy.deepcopy(model),
    loss_and_weight,
    lambda named_parameters: torch.optim.AdamW(named_parameters, lr=1e-3),
    policy="bf16",
)
for _ in range(3):
    outcome = engine.step(microbatches)
    print(f"mean loss of a sample: {outcome.numbers.loss:.3f}")

# %% [markdown]
# Read on: [accumulation](../accumulation.md) shows the loop over several ranks and the error of
# other systems, [the arithmetic of a step](../numerics.md) why sums need FP32.
