"""Training steps of others: right ones, and wrong ones with the class that names them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import distmp

VOCABULARY, WIDTH, LENGTH = 11, 16, 6
Microbatches = list[tuple[Tensor, Tensor]]


class Model(nn.Module):
    """A tiny language model; options are what models of others have."""

    def __init__(
        self, *, dropout: float = 0.0, tied: bool = False, checkpointed: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self._checkpointed = checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self._checkpointed:
            return self.head(checkpoint(self._block, hidden, use_reentrant=False))
        return self.head(self._block(hidden))

    def _block(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.norm(hidden + torch.tanh(self.linear(hidden))))


def make_model(**options: Any) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(**options)


def samples(count: int = 12) -> Microbatches:
    """Return samples with 1 to 5 labels each."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        tokens, labels = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        found.append((tokens, labels.index_fill(0, torch.arange(1 + index % 5, LENGTH), -100)))
    return found


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor], reduction: str) -> Tensor:
    logits = model(batch[0]).flatten(0, 1).float()
    return F.cross_entropy(logits, batch[1].flatten(), reduction=reduction)


def tokens_of(microbatches: Microbatches, *, everywhere: bool = True) -> Tensor:
    count = torch.stack([(labels != -100).sum() for _, labels in microbatches]).sum()
    if everywhere and dist.is_initialized():
        dist.all_reduce(count)
    return count


def all_reduce(model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    if not dist.is_initialized():
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    summed = torch.cat([gradient.flatten() for gradient in gradients]).to(dtype)
    dist.all_reduce(summed)
    parts = summed.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def divide(model: nn.Module, by: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= by


def backward_of_sums(model: nn.Module, microbatches: Microbatches, divisor: Tensor | float) -> None:
    for batch in microbatches:
        (cross_entropy(model, batch, "sum") / divisor).backward()


# Right ones


def token_mean(model: nn.Module, microbatches: Microbatches) -> None:
    """The mean over all tokens of the step, with an all-reduce of one's own."""
    backward_of_sums(model, microbatches, tokens_of(microbatches))
    all_reduce(model)


def autocast(model: nn.Module, microbatches: Microbatches) -> None:
    total = tokens_of(microbatches)
    with torch.autocast("cpu", torch.bfloat16):
        backward_of_sums(model, microbatches, total)
    all_reduce(model)


def ddp_no_sync(model: nn.Module, microbatches: Microbatches) -> None:
    ddp = DistributedDataParallel(model)
    factor = dist.get_world_size() / tokens_of(microbatches)
    for index, batch in enumerate(microbatches):
        last = index == len(microbatches) - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            (cross_entropy(ddp, batch, "sum") * factor).backward()


def ddp_every_microbatch(model: nn.Module, microbatches: Microbatches) -> None:
    ddp = DistributedDataParallel(model)
    factor = dist.get_world_size() / tokens_of(microbatches)
    for batch in microbatches:
        (cross_entropy(ddp, batch, "sum") * factor).backward()


def returned(model: nn.Module, microbatches: Microbatches) -> dict[str, Tensor]:
    """Gradients that a custom optimizer keeps itself."""
    token_mean(model, microbatches)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def frozen(model: nn.Module) -> nn.Module:
    """Freeze what LoRA freezes: all but two layers."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("linear", "norm")))
    return model


def sharded(compute: torch.dtype | None = None, reduce: torch.dtype | None = None) -> nn.Module:
    model = make_model()
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    fully_shard(model.linear, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(
        make_model(), use_orig_params=True, device_id=torch.device("cpu")
    )


def fsdp2(model: nn.Module, microbatches: Microbatches) -> None:
    backward_of_sums(model, microbatches, tokens_of(microbatches) / ranks())


def with_z_loss(model: nn.Module, microbatches: Microbatches, factor: float) -> None:
    """Right, but the loss has a term that only a `loss_sum` of the user has."""
    wrapped = model if isinstance(model, FSDPModule) else DistributedDataParallel(model)
    tokens = tokens_of(microbatches) / ranks()
    for inputs, labels in microbatches:
        logits, targets = wrapped(inputs).flatten(0, 1), labels.flatten()
        z_loss = (logits.logsumexp(-1).square() * (targets != -100)).sum()
        loss = F.cross_entropy(logits, targets, reduction="sum") + factor * z_loss
        (loss / tokens).backward()


def global_mean(model: nn.Module, microbatches: Microbatches) -> None:
    tokens, count = tokens_of(microbatches, everywhere=False), len(microbatches)
    wrapped = model if isinstance(model, FSDPModule) else DistributedDataParallel(model)
    for batch in microbatches:
        loss_sum = cross_entropy(wrapped, batch, "sum")
        distmp.global_mean(loss_sum, tokens, wrapped, microbatches=count).backward()


class Accelerated:
    """The loop that accelerate documents for gradient accumulation with uneven batches."""

    def __init__(self, model: nn.Module) -> None:
        self.accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
        self.model = self.accelerator.prepare(model)

    def train_step(self, model: nn.Module, microbatches: Microbatches) -> None:
        total = tokens_of(microbatches)
        self.accelerator.gradient_accumulation_steps = len(microbatches)
        self.accelerator.step = 0
        for batch in microbatches:
            with self.accelerator.accumulate(model):
                loss = cross_entropy(model, batch, "sum") * ranks() * len(microbatches) / total
                self.accelerator.backward(loss)


# Wrong ones


def fsdp2_rank_means(model: nn.Module, microbatches: Microbatches) -> None:
    local = tokens_of(microbatches, everywhere=False).clamp(min=1)
    backward_of_sums(model, microbatches, local)


def fsdp2_clipped_by_shard(model: nn.Module, microbatches: Microbatches) -> None:
    fsdp2(model, microbatches)
    shards = [p.grad.to_local() for p in model.parameters()]
    norm = torch.stack([shard.norm() for shard in shards]).norm()
    for shard in shards:
        shard *= 0.05 / norm


def divided_twice(model: nn.Module, microbatches: Microbatches) -> None:
    """The loss is normalized by all tokens, and DDP divides by the number of ranks again."""
    ddp = DistributedDataParallel(model) if dist.is_initialized() else model
    backward_of_sums(ddp, microbatches, tokens_of(microbatches))


def never_divided(model: nn.Module, microbatches: Microbatches) -> None:
    """Scaled by the number of ranks for DDP, but summed."""
    backward_of_sums(model, microbatches, tokens_of(microbatches) / ranks())
    all_reduce(model)


def microbatches_twice(model: nn.Module, microbatches: Microbatches) -> None:
    """The loss is that of the mean already; a trainer divides by the accumulation steps again."""
    token_mean(model, microbatches)
    divide(model, len(microbatches))


def microbatch_means(model: nn.Module, microbatches: Microbatches) -> None:
    """What most loops do: the mean loss of each microbatch, divided by their number."""
    for batch in microbatches:
        (cross_entropy(model, batch, "mean").nan_to_num() / len(microbatches)).backward()
    all_reduce(model)
    divide(model, ranks())


def rank_means(model: nn.Module, microbatches: Microbatches) -> None:
    """Divided by the tokens of this rank only."""
    local = tokens_of(microbatches, everywhere=False).clamp(min=1)
    backward_of_sums(model, microbatches, local)
    all_reduce(model)
    divide(model, ranks())


def pass_means(model: nn.Module, microbatches: Microbatches) -> None:
    """Divided by the tokens of all ranks in each microbatch, and by their number."""
    for batch in microbatches:
        total = tokens_of([batch]).clamp(min=1)
        (cross_entropy(model, batch, "sum") / total / len(microbatches)).backward()
    all_reduce(model)


def not_normalized(model: nn.Module, microbatches: Microbatches) -> None:
    backward_of_sums(model, microbatches, 1.0)
    all_reduce(model)


def sample_mean(model: nn.Module, microbatches: Microbatches) -> None:
    """The mean of the mean losses of samples, as many losses of sequences are."""
    count = sum(int((labels != -100).any(1).sum()) for _, labels in microbatches)
    for tokens, labels in microbatches:
        losses = F.cross_entropy(model(tokens).mT, labels, reduction="none")
        means = losses.sum(1) / (labels != -100).sum(1).clamp(min=1)
        (means.sum() / count).backward()


def accumulated_twice(model: nn.Module, microbatches: Microbatches) -> None:
    token_mean(model, microbatches)
    divide(model, 0.5)


def last_microbatch(model: nn.Module, microbatches: Microbatches) -> None:
    """`zero_grad` within the loop over microbatches."""
    total = tokens_of(microbatches)
    for batch in microbatches:
        model.zero_grad()
        (cross_entropy(model, batch, "sum") / total).backward()
    all_reduce(model)


def never_reduced(model: nn.Module, microbatches: Microbatches) -> None:
    backward_of_sums(model, microbatches, tokens_of(microbatches))


def reduced_again(model: nn.Module, microbatches: Microbatches) -> None:
    """Sums over ranks after each microbatch, those of earlier ones included."""
    total = tokens_of(microbatches)
    for batch in microbatches:
        (cross_entropy(model, batch, "sum") / total).backward()
        all_reduce(model)


def reduced_in_bf16(model: nn.Module, microbatches: Microbatches) -> None:
    backward_of_sums(model, microbatches, tokens_of(microbatches))
    all_reduce(model, dtype=torch.bfloat16)


def head_on_one_rank(model: nn.Module, microbatches: Microbatches) -> None:
    token_mean(model, microbatches)
    if dist.is_initialized() and dist.get_rank() == 1:
        model.head.weight.grad = None


def head_not_reduced(model: nn.Module, microbatches: Microbatches) -> None:
    backward_of_sums(model, microbatches, tokens_of(microbatches))
    local = model.head.weight.grad.clone()
    all_reduce(model)
    model.head.weight.grad = local


def clipped(model: nn.Module, microbatches: Microbatches) -> None:
    token_mean(model, microbatches)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clipped_on_each_rank(model: nn.Module, microbatches: Microbatches) -> None:
    """Clips what this rank has before it is reduced."""
    backward_of_sums(model, microbatches, tokens_of(microbatches))
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    all_reduce(model)


def scaled(model: nn.Module, microbatches: Microbatches) -> None:
    """The loss scale of a GradScaler that is not removed."""
    token_mean(model, microbatches)
    divide(model, 2.0**-12)


def not_finite(model: nn.Module, microbatches: Microbatches) -> None:
    """A microbatch without labels is divided by 0."""
    for tokens, labels in microbatches:
        mask = labels != -100
        losses = model(tokens).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        (-(losses * mask).sum() / mask.sum() / len(microbatches)).backward()
    all_reduce(model)


def one_rank_counts_half(model: nn.Module, microbatches: Microbatches) -> None:
    half = 2.0 if dist.is_initialized() and dist.get_rank() == 1 else 1.0
    backward_of_sums(model, microbatches, tokens_of(microbatches) * half)
    all_reduce(model)


def same_data(model: nn.Module, microbatches: Microbatches) -> None:
    """Every rank trains on the samples of rank 0, as with a sampler without ranks."""
    shared = [microbatches if ranks() == 1 else None]
    if ranks() > 1:
        shared = [microbatches]
        dist.broadcast_object_list(shared)
    token_mean(model, shared[0])


TrainStep = Callable[[Any, Microbatches], object]


def local_wrong() -> Iterator[tuple[str, TrainStep]]:
    """Yield the wrong training steps of one process, with their class."""
    yield "microbatches_twice", microbatches_twice
    yield "microbatch_means", microbatch_means
    yield "sum", not_normalized
    yield "sample_mean", sample_mean
    yield "accumulated_twice", accumulated_twice
    yield "last_microbatch", last_microbatch
    yield "clipped", clipped
    yield "loss_scale", scaled
    yield "not_finite", not_finite


def distributed_wrong() -> Iterator[tuple[str, TrainStep]]:
    """Yield the wrong training steps of several ranks, with their class."""
    yield "ranks_twice", divided_twice
    yield "ranks_never", never_divided
    yield "microbatch_means", microbatch_means
    yield "rank_means", rank_means
    yield "pass_means", pass_means
    yield "own_rank", never_reduced
    yield "own_rank", head_not_reduced
    yield "reduced_again", reduced_again
    yield "reduced_in_16_bits", reduced_in_bf16
    yield "missing", head_on_one_rank
    yield "clipped", clipped_on_each_rank
    yield "weighted", one_rank_counts_half
    yield "same_data", same_data
