"""`global_mean` with the modules that accelerate, Fabric and Lightning wrap."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import distmp
from tests.ports import reserved_port
from tests.ranks import run_ranks

INPUTS = torch.ones(1, 2)
# Rank 0 has a loss of 1 and a weight of 1, rank 1 a loss of 2 and a weight of 3.
EXPECTED = [(1 + 2) / (1 + 3)] * 2


def mean_loss(model: Any, wrapped: nn.Module) -> Tensor:
    rank = dist.get_rank()
    return distmp.global_mean((model(INPUTS) * (1 + rank)).sum(), 1 + 2 * rank, wrapped)


def linear() -> nn.Module:
    return nn.Linear(2, 1, bias=False)


def with_accelerate() -> list[float]:
    from accelerate import Accelerator

    model = linear()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    wrapped = accelerator.prepare(model)
    accelerator.backward(2 * mean_loss(wrapped, wrapped))
    return model.weight.grad.flatten().tolist()


def with_fabric() -> list[float]:
    from lightning.fabric import Fabric

    model = linear()
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    wrapped = fabric.setup(model)
    fabric.backward(mean_loss(wrapped, wrapped))
    return model.weight.grad.flatten().tolist()


def with_lightning() -> list[float]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear()
            self.gradients: list[float] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            with pytest.raises(distmp.ConfigError, match=r"trainer\.strategy\.model"):
                mean_loss(self.linear, self)
            return 2 * mean_loss(self.linear, self.trainer.strategy.model)

        def on_after_backward(self) -> None:
            self.gradients += self.linear.weight.grad.flatten().tolist()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=1,
        accumulate_grad_batches=2,
        **quiet,
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(2)), batch_size=1))
    return module.gradients


def under_torchrun() -> list[list[float]]:
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none", GROUP_RANK="0")
    return [with_accelerate(), with_fabric(), with_lightning()]


@pytest.mark.nightly
@pytest.mark.slow
def test_wrapped_modules_have_global_mean_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        results = run_ranks(under_torchrun, 2, initialize=False)
    for result in results:
        assert result == [EXPECTED] * 3
