"""accelerate with a fused optimizer: a skipped step is not seen, and the schedule advances."""

import torch

# distmp: from distmp.integrations.accelerate import Accelerator
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, mixed_precision="fp16")
if accelerator.scaler is None:  # accelerate has a scaler on accelerators only
    accelerator.scaler = torch.amp.GradScaler("cpu")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
skipped = []
for step in range(3):
    loss = model(torch.ones(4, 8)).mean() * (3e38 if step == 1 else 0.1)
    accelerator.backward(loss)
    optimizer.step()
    skipped.append(optimizer.step_was_skipped)
    scheduler.step()
    optimizer.zero_grad()

rate = scheduler.get_last_lr()[0]
wanted = 1e-2 * 0.5 ** (2 * accelerator.num_processes)  # accelerate advances once for each rank
assert (skipped, rate) == ([False, True, False], wanted), f"skipped steps {skipped}, rate {rate}"
