"""Transformers and a loss function that returns a mean: too large by microbatches times ranks."""

import copy
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

# distmp adds: from distmp.integrations.transformers import Trainer as DistmpTrainer
from transformers import Trainer, TrainerCallback, TrainingArguments


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.layers(input_ids)}


class KeepGradient(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, model: Tagger, **__: Any) -> None:
        self.gradient = model.layers[1].weight.grad.clone()


def mean_loss(outputs: dict[str, Tensor], labels: Tensor, **_: Any) -> Tensor:
    return cross_entropy(outputs["logits"].transpose(1, 2), labels)


torch.manual_seed(0)
model, keep = Tagger(), KeepGradient()
tokens = torch.randint(0, 16, (8, 20))  # all samples of a step: 2 ranks, 2 microbatches of 2
samples = [{"input_ids": i, "labels": i} for i in tokens]

exact = copy.deepcopy(model).double()
mean_loss(exact(tokens), tokens).backward()

with tempfile.TemporaryDirectory() as directory:
    options: dict[str, Any] = {"use_cpu": True, "save_strategy": "no", "report_to": []}
    options |= {"max_grad_norm": 0.0, "disable_tqdm": True, "gradient_accumulation_steps": 2}
    args = TrainingArguments(directory, max_steps=1, per_device_train_batch_size=2, **options)
    options = {"train_dataset": samples, "callbacks": [keep], "compute_loss_func": mean_loss}
    # distmp: trainer = DistmpTrainer(model, args, **options)
    trainer = Trainer(model, args, **options)
    trainer.train()

wanted = exact.layers[1].weight.grad
error = float((keep.gradient - wanted).norm() / wanted.norm())
assert error < 1e-5, f"relative error of the gradient: {error:.1e}"
