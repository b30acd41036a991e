"""Trainers of Transformers with distmp, against float64 and against Transformers' own Trainer."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distmp.errors import ConfigError, TrainingError
from distmp.scaling import DistributedGradScaler, LossScaleConfig
from tests.ranks import ranks

VOCABULARY = 16
LENGTH = 8


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples whose numbers of labels are very different, from 1 to 7."""

    def __init__(self, samples: int, targets: str = "labels") -> None:
        self.samples, self.targets = samples, targets

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        sample = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if self.targets == "positions":
            return sample | {"start_positions": tokens[0] % LENGTH, "end_positions": tokens[1] % 8}
        if self.targets == "number":
            return sample | {"labels": tokens[0].float()}
        labels = torch.where(torch.arange(LENGTH) < (index * 5) % 7, -100, tokens)
        return sample | {"labels": labels}


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = {"vocab_size": VOCABULARY, "num_attention_heads": 2, **sizes, **changes}
    return LlamaForCausalLM(LlamaConfig(**config))


def bert(head: str, **changes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = {"vocab_size": VOCABULARY, "num_attention_heads": 2, **sizes, **drop, **changes}
    return getattr(transformers, head)(transformers.BertConfig(**config))


def arguments(path: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    defaults: dict[str, Any] = {
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(path), **{**defaults, **changes})


def recording(trainer: type[Any]) -> type[Any]:
    """Return a trainer that keeps the batches, gradients and weights of every step."""

    class Recording(trainer):  # type: ignore[misc]
        def __init__(self, *positional: Any, **keywords: Any) -> None:
            self.steps: list[tuple[list[Any], list[Tensor]]] = []
            super().__init__(*positional, **keywords)
            self.before = copy.deepcopy(self.model).double()

        def get_batch_samples(self, *positional: Any) -> Any:
            batches, items = super().get_batch_samples(*positional)
            self.steps.append((batches, []))
            return batches, items

        def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
            parameters = self.accelerator.unwrap_model(model).parameters()
            grads = [p.grad.clone() for p in parameters if p.grad is not None]
            scaler = self.accelerator.scaler
            scale = 1.0 if scaler is None else scaler.get_scale()
            self.steps[-1][1].extend(grad / scale for grad in grads)
            return super()._get_grad_norm(model, grad_norm)

    return Recording


def batches_of_all_ranks(batches: list[Any]) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    plain = [{name: value for name, value in batch.items()} for batch in batches]
    dist.all_gather_object(gathered, plain)
    return [batch for of_rank in gathered for batch in of_rank]


Loss = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, int]]


def next_tokens(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="sum")
    return losses, int(labels.ne(-100).sum())


def same_tokens(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="sum")
    return losses, int(batch["labels"].ne(-100).sum())


def squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return (logits.squeeze(1) - batch["labels"]).square().sum(), len(logits)


def positions(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    start = F.cross_entropy(outputs.start_logits, batch["start_positions"], reduction="sum")
    end = F.cross_entropy(outputs.end_logits, batch["end_positions"], reduction="sum")
    return (start + end) / 2, len(outputs.start_logits)


def reference(model: nn.Module, batches: list[Any], loss: Loss) -> tuple[float, list[Tensor]]:
    """Return loss and gradient of the mean over all items, in float64."""
    model.zero_grad()
    sums, counts = zip(*(loss(model, batch) for batch in batches), strict=True)
    mean = sum(sums) / sum(counts)
    mean.backward()
    return mean.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def largest_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    flat = [torch.cat([grad.double().flatten() for grad in grads]) for grads in (found, wanted)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def mean_of_microbatch(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss function that ignores the number of items, as many do."""
    return F.cross_entropy(outputs.logits.transpose(1, 2), labels)


def sum_over_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss function as Transformers documents it; it needs the number of items."""
    total = F.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="sum")
    return total / num_items_in_batch


# name -> model, reference, data, further arguments of the trainer
CASES: dict[str, tuple[Callable[[], nn.Module], Loss, str, dict[str, Any]]] = {
    "Llama": (llama, next_tokens, "labels", {}),
    "BertForMaskedLM": (lambda: bert("BertForMaskedLM"), same_tokens, "labels", {}),
    "regression": (
        lambda: bert("BertForSequenceClassification", num_labels=1),
        squares,
        "number",
        {},
    ),
    "question answering": (
        lambda: bert("BertForQuestionAnswering"),
        positions,
        "positions",
        {},
    ),
    "mean of a microbatch": (
        lambda: bert("BertForMaskedLM"),
        same_tokens,
        "labels",
        {"compute_loss_func": mean_of_microbatch},
    ),
    "sum over items": (
        lambda: bert("BertForMaskedLM"),
        same_tokens,
        "labels",
        {"compute_loss_func": sum_over_items},
    ),
}


def errors_of(trainer: type[Any], name: str, path: Path, **changes: Any) -> list[float]:
    """Train an epoch; return the error of each step's gradient and loss, against float64."""
    build, loss, targets, keywords = CASES[name]
    # 10 samples: on 2 ranks 3 microbatches, of 2, 2 and 1 samples, in 2 steps.
    trained = recording(trainer)(
        model=build(),
        args=arguments(path, learning_rate=0.0, num_train_epochs=1, **changes),
        train_dataset=Sentences(10, targets),
        **keywords,
    )
    trained.train()
    errors = []
    logged = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    for (batches, grads), found in zip(trained.steps, logged, strict=True):
        wanted, gradient = reference(trained.before, batches_of_all_ranks(batches), loss)
        errors.append(max(largest_error(grads, gradient), abs(found - wanted) / wanted))
    return errors



@ranks(2)
def test_x(tmp_path: Path) -> None:
    import accelerate.state
    from distmp.integrations.transformers import Trainer
    fp16(tmp_path, Trainer)
    fsdp(tmp_path, Trainer)

def trained(trainer, path, samples=24, resume=None, **keywords):
    changes = keywords.pop("changes", {})
    made = trainer(model=keywords.pop("model", None) or llama(), args=arguments(path, **changes), train_dataset=Sentences(samples), **keywords)
    made.train(resume_from_checkpoint=resume)
    return made

def fp16(path, Trainer):
    class Overflowing(Trainer):
        def compute_loss(self, *positional: Any, **keywords: Any) -> Tensor:
            loss = super().compute_loss(*positional, **keywords)
            broken = self.state.global_step == 1 and self.accelerator.process_index == 1
            return loss * (torch.inf if broken else 1.0)
    for policy in ("fp16-autocast", "bf16-autocast", "fp32"):
        made = trained(Overflowing, path / policy, policy=policy, loss_scale=LossScaleConfig(init=2.0**8), changes={"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2})
        print(made.state.log_history, os.listdir(path / policy / "checkpoint-2"))
        from accelerate.state import AcceleratorState
        w = [p.tolist() for p in made.model.parameters()]
        again = trained(Overflowing, path / policy, policy=policy, loss_scale=LossScaleConfig(init=2.0**8), changes={"lr_scheduler_type": "linear"}, resume=str(path / policy / "checkpoint-2"))
        print(again.state.log_history)
        print("same", w == [p.tolist() for p in again.model.parameters()])

def fsdp(path, Trainer):
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    for policy in ("fp32", "bf16", "fp16", "fp16-autocast"):
      with mock.patch.object(torch.accelerator, "is_available", return_value=True):
        made = recording(Trainer)(model=llama(), args=arguments(path, fsdp=True, max_steps=2,fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}), train_dataset=Sentences(24), policy=policy,loss_scale=LossScaleConfig(init=2.0**8))
        made.train()
      print(policy, made.state.log_history, type(made.model_wrapped))
      wanted, gradient = reference(made.before, batches_of_all_ranks(made.steps[0][0]), next_tokens)
      full = [grad.full_tensor() for grad in made.steps[0][1]]
      print(wanted, largest_error(full, gradient))
