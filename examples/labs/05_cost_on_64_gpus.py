# %% [markdown]
# # What would your model cost on 64 GPUs?
#
# How much memory does each GPU need, and how many bytes does it send in a step? You need no GPU to
# know: `distmp explain` runs the steps of rank 0 with tensors that have no values.

# %% tags=["remove-output"]
# %pip install --quiet distmp matplotlib

# %%
import re
import subprocess
import sys

import matplotlib.pyplot as plt

from distmp.commands.explain.command import ExplainConfig
from distmp.commands.explain.explanation import explain
from distmp.commands.explain.report import report

# %% [markdown]
# ## A model on 8 machines with 8 GPUs each
#
# These are the options of the command `distmp explain`. Change the size to 1m, 22m, 125m, 350m,
# 1.3b, 3b, 8b or 70b. For your own `nn.Module`, pass `--model.name my_file:build`, where `build()`
# returns it ([your model](../own-model.md)), or `--config` with your own file. 256 samples are 4
# microbatches of one sample on each of 64 ranks.

# %%
RUN = [
    *("--config", "preset:quickstart", "--model.size", "1.3b", "--data.sequence-length", "2048"),
    *("--batch.global-batch-size", "256", "--batch.microbatch-size", "1"),
    *("--precision.policy", "bf16"),
]
STRATEGIES = {
    "ddp": ["--strategy", "ddp"],
    "ddp,\nshard_optimizer": ["--strategy", "ddp", "--shard-optimizer", "True"],
    "fsdp": ["--strategy", "fsdp", "--sharding.accumulate", "sharded"],
}
found = {
    name: explain(ExplainConfig.load([*RUN, *options]), world_size=64, ranks_per_machine=8)
    for name, options in STRATEGIES.items()
}

# %% [markdown]
# The command prints this text. In its second line, `cpu` is the device of this machine. `count` is
# the number of parameters. The other columns are dtypes:
#
# - `stored`, `updated`: of parameters between steps, and in the optimizer's update;
# - `computed`, `observed`: of operations as the policy asks, and as the steps ran;
# - `reduced`, `summed`: of gradients sent between ranks, and summed over microbatches;
# - `kept`: of modules that the policy keeps in FP32.

# %%
print("\n".join(report(found["fsdp"])))

# %% [markdown]
# ## The strategies side by side

# %%
for name, run in found.items():
    print(
        f"{' '.join(name.split())}: {run.memory_bytes / 2**30:.1f} GiB;\n"
        f"  sends {run.communication_bytes / 2**30:.1f} GiB per step, "
        f"{run.between_machines_bytes / 2**30:.1f} GiB of it between machines"
    )

# %%
# ddp needs the most memory of a rank and fsdp the least. fsdp sends the most bytes per step.
figure, (upper, lower) = plt.subplots(2, figsize=(7, 8), layout="constrained")
names = list(found)
bottom = [0.0] * len(names)
for part in dict.fromkeys(part for run in found.values() for part in run.memory):
    sizes = [run.memory.get(part, 0) / 2**30 for run in found.values()]
    upper.bar(names, sizes, bottom=bottom, label=part)
    bottom = [sum(pair) for pair in zip(bottom, sizes, strict=True)]
upper.set(title="peak memory of a rank, GiB", ylim=(0, 1.05 * max(bottom)))
upper.legend(fontsize="x-small")
between = [run.between_machines_bytes / 2**30 for run in found.values()]
inside = [
    run.communication_bytes / 2**30 - sent
    for run, sent in zip(found.values(), between, strict=True)
]
lower.bar(names, between, color="tab:red", label="between machines")
lower.bar(names, inside, bottom=between, color="tab:blue", label="inside a machine")
lower.set(title="bytes that a rank sends per step, GiB")
lower.legend(fontsize="small")
figure.savefig("cost_on_64_gpus.png")

# %% [markdown]
# `ddp` keeps the whole optimizer state on each GPU, `shard_optimizer` divides it, and `fsdp` also
# divides weights and gradients. `ddp` reduces gradients once per step. `fsdp` gathers weights and
# reduces gradients in each of the 4 microbatches, so it sends more bytes, the more microbatches
# there are. Most of the memory that is left are activations, which no strategy divides:
# with `--activation-checkpointing blocks`, backward computes most of them again. Operations and
# their temporary memory are those of the device of this machine; libraries and allocators of a GPU
# need more.
#
# ## A run, and its report
#
# The numbers of a run itself are in its report. Train for a few steps on this machine:


# %%
def distmp(*arguments: str) -> str:
    """Run `distmp ARGUMENTS` as in a terminal, and return its output."""
    command = [sys.executable, "-m", "distmp", *arguments]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(found.stdout + found.stderr)
    return found.stdout


OPTIONS = [
    *("--config", "preset:quickstart", "--run-dir", "runs/lab", "--steps", "10"),
    *("--strategy", "single", "--precision.policy", "fp32", "--data.sequence-length", "64"),
    *("--validation.final-samples", "8"),
]
output = distmp("train", *OPTIONS)
print(output)
# The first time runs/lab, then runs/lab-2 and so on.
(directory,) = re.findall(r"^run directory: (.*)$", output, re.MULTILINE)
print("report:", distmp("report", directory))

# %% [markdown]
# The page `report.html` in the directory of the run works without a network. It has the loss, the
# gradient norm, the time, the memory and the cause of each skipped step.
#
# ## The command
#
# One line tells you, before you start 64 ranks:
#
# ```sh
# distmp explain --config my.yaml --world-size 64
# ```
#
# Read on: [explain](../explain.md) compares predictions with real steps,
# [large models](../large_models.md) covers models that do not fit on one GPU.
