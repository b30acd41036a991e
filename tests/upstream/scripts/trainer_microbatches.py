"""Transformers and a model without loss keywords: a mean of the means of microbatches and ranks."""

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

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(input_ids)
        return {"loss": cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


class KeepGradient(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, model: Tagger, **__: Any) -> None:
        self.gradient = model.layers[1].weight.grad.clone()


torch.manual_seed(0)
model, keep = Tagger(), KeepGradient()
tokens = torch.randint(0, 16, (8, 20))  # all samples of a step: 2 ranks, 2 microbatches of 2
labels = tokens.masked_fill(torch.arange(20) > torch.arange(0, 24, 3)[:, None] % 19, -100)
samples = [{"input_ids": i, "labels": j} for i, j in zip(tokens, labels, strict=True)]

exact = copy.deepcopy(model).double()
exact(tokens, labels)["loss"].backward()

with tempfile.TemporaryDirectory() as directory:
    options: dict[str, Any] = {"use_cpu": True, "save_strategy": "no", "report_to": []}
    options |= {"max_grad_norm": 0.0, "disable_tqdm": True, "gradient_accumulation_steps": 2}
    args = TrainingArguments(directory, max_steps=1, per_device_train_batch_size=2, **options)
    # distmp: trainer = DistmpTrainer(model, args, train_dataset=samples, callbacks=[keep])
    trainer = Trainer(model, args, train_dataset=samples, callbacks=[keep])
    trainer.train()

wanted = exact.layers[1].weight.grad
error = float((keep.gradient - wanted).norm() / wanted.norm())
assert error < 1e-5, f"relative error of the gradient: {error:.1e}"
