# %% [markdown]
# # Why does float16 lose gradients?
#
# float16 has no number between 0 and 2^-24, and rounds what is at most 2^-25 to 0. How many of the
# gradients of your model are that small?

# %% tags=["remove-output"]
# %pip install --quiet distmp matplotlib

# %%
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import distmp

# %% [markdown]
# ## A model
#
# This is a small classifier. Replace the cell with your own model: define `model`, and `loss()`,
# which returns the mean loss of a batch.

# %%
torch.manual_seed(0)
labels = torch.randint(10, (4096,))
inputs = torch.randn(10, 32)[labels] + 0.7 * torch.randn(4096, 32)
model = nn.Sequential(
    *(nn.Linear(32, 128), nn.ReLU()),
    *(nn.Linear(128, 128), nn.ReLU()),
    nn.Linear(128, 10),
)


def loss() -> Tensor:
    return cross_entropy(model(inputs).float(), labels)


# %% [markdown]
# Gradients become smaller during training, so first train for some steps in float32.

# %%
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(200):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()

# %% [markdown]
# ## The gradients of one backward pass
#
# Autocast computes the gradients of activations in float16, and those of weights from them. A loss
# scale multiplies the loss before backward. The gradients of weights are divided by it afterwards,
# in float32.


# %%
def backward(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the gradients of activations, and those of weights after dividing by the scale."""
    activations: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        # Left out: what has no gradient, such as flattened inputs, and the tuples of an LSTM.
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: activations.append(gradient.float().flatten()))

    layers = [module for module in model.modules() if not [*module.children()]]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    model.zero_grad()
    torch.manual_seed(0)  # each pass draws the same dropout masks
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        value = loss()
    (value * scale).backward()
    for hook in hooks:
        hook.remove()
    weights = [p.grad.flatten() / scale for p in model.parameters() if p.grad is not None]
    return torch.cat(activations), torch.cat(weights)


exact, exact_weights = backward(torch.float32)
in_float16: dict[float, Tensor] = {}
for scale in (1.0, 2.0**16):
    in_float16[scale], weights = backward(torch.float16, scale)
    lost = 1 - in_float16[scale].count_nonzero() / exact.count_nonzero()
    error = (weights - exact_weights).norm() / exact_weights.norm()
    print(
        f"loss scale {scale:.0f}: {lost:.1%} of the gradients of activations become 0,\n"
        f"  the gradients of weights have an error of {error:.1%}"
    )


# %% [markdown]
# ## The exponents
#
# Gray: the gradients of activations in float32, times the loss scale. Blue: those that are not 0 in
# float16, which rounds numbers between 2^-25 and 2^-24 to 2^-24. A loss scale moves all gradients
# to the right, into the range of float16.


# %%
def exponents(gradients: Tensor) -> Any:
    """Return the exponents of the gradients that are not 0."""
    return gradients[gradients != 0].abs().log2().floor().numpy()


# Two histograms of exponents. With loss scale 1, most gradients are in the range that float16
# rounds to 0; with 65536, nearly all are to the right of it.
figure, panels = plt.subplots(2, sharex=True, figsize=(7, 6), layout="constrained")
bins = np.arange(-60, 20)
for axes, (scale, found) in zip(panels, in_float16.items(), strict=True):
    axes.hist(exponents(exact * scale), bins, color="0.75", label="float32")
    axes.hist(exponents(found), bins, color="tab:blue", alpha=0.6, label="float16")
    axes.axvspan(-60, -25, color="tab:red", alpha=0.12, label="0 in float16")
    axes.axvspan(-25, -14, color="tab:orange", alpha=0.12, label="fewer bits in float16")
    axes.axvspan(16, 20, color="tab:purple", alpha=0.25, label="inf in float16")
    axes.set(title=f"loss scale {scale:.0f}", ylabel="gradients", xlim=(-60, 20))
panels[0].legend(fontsize="small", loc="upper left")
panels[1].set_xlabel("exponent of the gradient times the loss scale")
figure.savefig("fp16_exponents.png")

# %% [markdown]
# ## The fix
#
# No constant scale fits all models and all of a training: if it is too low, gradients are 0; if it
# is too high, they are inf. The scaler halves its scale after an overflow, and doubles it after
# 2,000 steps without one. One line creates it:

# %%
scaler = distmp.DistributedGradScaler("cpu", optimizers=[optimizer])

# %% [markdown]
# A step with it:

# %%
optimizer.zero_grad()
with torch.autocast("cpu", torch.float16):
    value = loss()
scaler.scale(value).backward()
scaler.step(optimizer)
scaler.update()
print(f"loss {value.item():.4f}, loss scale {scaler.get_scale():.0f}")

# %% [markdown]
# On one rank, torch's `GradScaler` does the same; the next lab shows what differs on two. With
# `distmp.Engine`, the policy `fp16-autocast` does all of this.
#
# Read on: [the arithmetic of a step](../numerics.md) explains the formats,
# [the scaler](../scaler.md) its calls and the loss scale of short runs.
