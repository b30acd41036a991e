"""An accelerate script in float16 with distmp's policy and scaler: the marked line is new.

    accelerate launch --multi-gpu --num-processes 2 examples/accelerate_fp16.py --bad-batch-at 5

Despite `--multi-gpu` it also runs on CPUs. Rank 1 gets a batch of infinities at step 5: both ranks
skip that step, the loss scale is halved, and the learning rate schedule does not advance.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

# In place of: from accelerate import Accelerator
from distmp.integrations.accelerate import Accelerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bad-batch-at", type=int, help="step at which rank 1 gets infinities")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="fp16")
    inputs = torch.randn(160, 8)
    data = DataLoader(TensorDataset(inputs, inputs.mean(1, keepdim=True)), batch_size=8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)

    for step, (batch, targets) in enumerate(data, start=1):
        if step == arguments.bad_batch_at and accelerator.process_index == 1:
            batch = torch.full_like(batch, torch.inf)
        optimizer.zero_grad()
        loss = mse_loss(model(batch), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        print(
            f"rank {accelerator.process_index} step {step}"
            f" skipped={accelerator.optimizer_step_was_skipped}"
            f" scale={accelerator.scaler.get_scale():g} lr={scheduler.get_last_lr()[0]:.5f}"
        )
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(f"rank {accelerator.process_index} ends with weights of norm {weights.norm():.8e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
