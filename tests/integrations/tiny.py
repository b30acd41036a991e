"""Tiny models and data for the trainers of Transformers and TRL, and float64 references."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import from_all_ranks

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


class WithoutLossKeywords(nn.Module):
    """A model whose loss is the mean of a microbatch, and that takes no further keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Any:
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits
        if labels is None:
            return type(self).Logits(logits)
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}

    class Logits:
        """Outputs without a loss."""

        def __init__(self, logits: Tensor) -> None:
            self.logits = logits


def tokenizer() -> Any:
    """Return a tokenizer of the numbers below VOCABULARY."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = [str(number) for number in range(VOCABULARY - 2)]
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *numbers])}
    fast = Tokenizer(models.WordLevel(words, unk_token="0"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")


def arguments(path: Path, kind: Any = None, **changes: Any) -> Any:
    """Return TrainingArguments, or those of another class."""
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
    return (kind or TrainingArguments)(str(path), **{**defaults, **changes})


def recording(trainer: type[Any]) -> type[Any]:
    """Return a trainer that keeps the batches, gradients and weights of every step."""

    class Recording(trainer):  # type: ignore[misc]
        def __init__(self, *, model: nn.Module, **keywords: Any) -> None:
            self.steps: list[tuple[list[Any], list[Tensor]]] = []
            self.before = copy.deepcopy(model).double()  # TRL changes its forward
            super().__init__(model=model, **keywords)

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
    gathered = from_all_ranks([dict(batch) for batch in batches])
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


def mean_of_microbatch(
    outputs: Any, labels: Tensor, num_items_in_batch: Any = None, reduction: str = "mean"
) -> Tensor:
    """A loss function that ignores the number of items, as many do."""
    return F.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction=reduction)


def sum_over_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss function as Transformers documents it; it needs the number of items."""
    total = F.cross_entropy(outputs.logits.transpose(1, 2), labels, reduction="sum")
    return total / num_items_in_batch
