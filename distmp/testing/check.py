"""`check_gradient`: compares the gradient of a training step with float64."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distmp.distributed.ranks import Ranks
from distmp.errors import require
from distmp.testing import classify, gradients
from distmp.testing.reference import Forward, ForwardRecord, Reference, recorded_forwards
from distmp.testing.samples import DefaultLoss, LossSum, Split, collated, make_splits

WANTED = {"tokens": "token_mean", "samples": "sample_mean", "sum": "sum"}

# May return gradients by name of parameter.
TrainStep = Callable[[nn.Module, list[Any]], object]


def check_gradient(
    train_step: TrainStep,
    model: nn.Module,
    samples: Sequence[Any],
    weights: str = "tokens",
    *,
    loss_sum: LossSum | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    reference: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    max_norm: float | None = None,
) -> None:
    """Check that a training step computes the gradient of the mean over all tokens or samples.

    In one process, the samples are divided over microbatches in several ways. If the default
    process group is initialized, they are divided over its ranks, too; every rank calls this
    function with the same samples.

    Args:
        train_step: Your code, called as `train_step(model, microbatches)` with the microbatches of
            this rank. It leaves gradients where the optimizer would find them, or returns them by
            name of parameter. Gradients are removed before each call. It may wrap the model.
        model: The model, plain or wrapped in DDP or FSDP.
        samples: At least three per rank, such as dicts of tensors with `labels` or pairs of inputs
            and labels; each without a batch dimension.
        weights: What the sum of losses is divided by: `tokens`, the weights that `loss_sum`
            returns; `samples`, which averages the mean losses of samples; `sum`, nothing.
        loss_sum: Returns the sum of the losses of a microbatch, and its weight, as the loss
            functions of `distmp.Engine` do. By default, the cross entropy over labels other than
            -100, and their number.
        collate: Makes a microbatch of a list of samples. By default, tensors are stacked.
        reference: A plain model of the same parameters, for models that FSDP1 shards.
        optimizer: If given, it has to have all parameters.
        max_norm: If given, the norm that `train_step` clips to. By default gradients are not
            clipped.

    Raises:
        GradientError: On every rank, with what is wrong with which parameters.
        ConfigError: For samples or a model that cannot be checked.
        SetupError: On every rank, if the loss of a microbatch cannot be computed.

    Example:
        >>> import torch
        >>> from distmp.testing import check_gradient
        >>> def train_step(model, microbatches):
        ...     for inputs, labels in microbatches:
        ...         loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        ...         (loss / len(microbatches)).backward()
        >>> samples = [(torch.ones(4) * index, torch.tensor(index % 2)) for index in range(8)]
        >>> try:
        ...     check_gradient(train_step, torch.nn.Linear(4, 2), samples)
        ... except AssertionError as error:
        ...     print(error.mismatches[0].kind)
        microbatch_means
    """
    require(weights in WANTED, "weights", weights, f"use one of {', '.join(WANTED)}")
    problem = "let loss_sum return the sum of the means of samples and their number, with 'tokens'"
    require(weights != "samples" or loss_sum is None, "weights", weights, problem)
    losses = [loss_sum] if loss_sum else [DefaultLoss(), DefaultLoss(of_samples=True)]
    losses = losses[::-1] if weights == "samples" else losses
    references = [Reference(reference or model, each) for each in losses]
    check = _Check(train_step, model, references, collate, max_norm)
    splits = [*make_splits([*samples], Ranks(None).world_size, tokens=weights == "tokens")]
    absent = [] if optimizer is None else [*in_no_optimizer(model, optimizer)]
    extra = "token_mean" if weights == "samples" else "sample_mean"
    for compared in ("", extra)[: len(losses)]:
        results = [check.run(split, compared) for split in splits]
        local = [*classify.diagnose(results, WANTED[weights]), *absent]
        found = classify.over_ranks(Ranks(None).gather(local))
        # The other mean takes time, and explains nothing that is already explained.
        if not {"weighted", "unexplained"} & {each.kind for each in found}:
            break
    problem = "there is nothing to compare: pass others, with labels"
    require(any(split.weights.any() for split in results), "weights of samples", 0, problem)
    if found:
        lines = [f"- {each}" for each in found]
        problem = "\n".join(["the gradient is wrong (see docs/testing.md):", *lines])
        raise classify.GradientError(problem, found)


def in_no_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[classify.GradientMismatch]:
    """Yield the trained parameters that no optimizer of this process has, if there are any."""
    held = gradients.held_parameters(model, optimizer)
    trained = {name: p for name, p in gradients.named_parameters(model).items() if p.requires_grad}
    for other in [] if held.issuperset(trained.values()) else gc.get_objects():
        if issubclass(type(other), torch.optim.Optimizer):
            held |= {p for group in other.param_groups for p in group["params"]}
    if absent := [name for name, p in trained.items() if p not in held]:
        yield classify.mismatch("in_no_optimizer", absent)


@dataclass(frozen=True)
class _Check:
    """Measures the gradient with one division of samples after the other."""

    train_step: TrainStep
    model: nn.Module
    references: Sequence[Reference]
    collate: Callable[[list[Any]], Any] | None
    max_norm: float | None

    def run(self, split: Split, extra: str) -> classify.SplitResult:
        """Return what was measured; every rank has to call it.

        Args:
            split: The division.
            extra: The class that the second reference computes; "" without.
        """
        first = Ranks(None).rank * split.each
        samples = split.samples[first : first + split.each]
        batches = [collated(each, self.collate) for each in samples]
        record = ForwardRecord(state=gradients.full_state(self.model))
        gradients.remove_gradients(self.model)
        with recorded_forwards(self.model, lambda: record), torch.random.fork_rng():
            returned = self.train_step(self.model, batches)
        names = gradients.named_parameters(self.model).keys()
        given = returned if isinstance(returned, Mapping) and names & returned.keys() else None
        measured = gradients.full_gradients(self.model, given)
        # With another number of forwards, it is unknown which belongs to which microbatch.
        known = len(record.forwards) == len(batches)
        states = [each.generators for each in record.forwards] if known else [()] * len(batches)
        record.forwards = [*map(Forward, batches, states)]
        own = self.references[0].replay(record, exact=True)
        other = self.references[1].replay(record).mean() if extra else {}
        return own.compared(split.name, self.max_norm, measured, extra, other)
