"""Lightning with a loss scale: the schedule advances after a skipped step."""

import lightning as L
import torch

# distmp: from distmp.integrations.lightning import MixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch).float().mean() * (3e38 if index == 1 else 0.1)

    def configure_optimizers(self) -> tuple[list[object], list[object]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": self.schedule, "interval": "step"}]


torch.manual_seed(0)
# distmp: precision = MixedPrecision("16-mixed", "cpu")
precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
trainer = L.Trainer(
    plugins=precision,
    accelerator="cpu",
    strategy="ddp",
    devices=2,
    max_steps=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
module = Regression()
trainer.fit(module, torch.utils.data.DataLoader(torch.ones(24, 8), batch_size=4))
rate = module.schedule.get_last_lr()[0]
assert rate == 1e-2 * 0.5**2, f"learning rate after two steps and a skipped one: {rate}"
