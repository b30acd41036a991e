"""`check_gradient`: compares the gradient of a training step with float64."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distmp.distributed.ranks import Ranks
from distmp.errors import require
from distmp.testing.classify import (
    GradientError,
    GradientMismatch,
    SplitResult,
    diagnose,
    inverse,
    mismatch,
    over_ranks,
)
from distmp.testing.gradients import (
    full_gradients,
    full_state,
    held_parameters,
    named_parameters,
    remove_gradients,
)
from distmp.testing.reference import ForwardRecord, Gradients, Reference, recorded_forwards
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
    plain = Reference(reference or model, loss_sum or DefaultLoss())
    check = _Check(train_step, model, plain, collate, weights, max_norm)
    splits = [*make_splits([*samples], Ranks(None).world_size, tokens=weights == "tokens")]
    absent = [] if optimizer is None else [*in_no_optimizer(model, optimizer)]
    for sample_means in (weights == "samples", True):
        results = [check.run(split, sample_means=sample_means) for split in splits]
        found = over_ranks(Ranks(None).gather([*diagnose(results, WANTED[weights]), *absent]))
        # Gradients of single samples take time, and explain nothing that is already explained.
        if sample_means or not {"weighted", "unexplained"} & {each.kind for each in found}:
            break
    if found:
        lines = "\n".join(f"- {mismatch}" for mismatch in found)
        raise GradientError(f"the gradient is wrong (see docs/testing.md):\n{lines}", found)


def in_no_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[GradientMismatch]:
    """Yield the trained parameters that no optimizer of this process has, if there are any."""
    held = held_parameters(model, optimizer)
    for other in gc.get_objects():
        if issubclass(type(other), torch.optim.Optimizer):
            held |= {p for group in other.param_groups for p in group["params"]}
    trained = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    if absent := [name for name, p in trained.items() if p not in held]:
        yield mismatch("in_no_optimizer", absent)


@dataclass(frozen=True)
class _Check:
    """Measures the gradient with one division of samples after the other."""

    train_step: TrainStep
    model: nn.Module
    reference: Reference
    collate: Callable[[list[Any]], Any] | None
    weights: str
    max_norm: float | None

    def run(self, split: Split, *, sample_means: bool) -> SplitResult:
        """Return what was measured; every rank has to call it."""
        batches = [collated(part, self.collate) for part in split.samples[Ranks(None).rank]]
        state = full_state(self.model)
        remove_gradients(self.model)
        with recorded_forwards(self.model) as record, torch.random.fork_rng():
            returned = self.train_step(self.model, batches)
        record.state = state
        names = named_parameters(self.model).keys()
        given = returned if isinstance(returned, Mapping) and names & returned.keys() else None
        gradients = full_gradients(self.model, given)
        own = self.reference.replay(batches, record)
        means = self._sample_means(split, own, record) if sample_means else {}
        return own.compared(gradients, split.name, self.max_norm, terms=means)

    def _sample_means(
        self, split: Split, own: Gradients, record: ForwardRecord
    ) -> dict[str, Tensor]:
        """Return the part of each microbatch in the mean over samples.

        There is none if all samples have the same weight, or if the loss of a microbatch is not
        the sum of those of its samples.
        """
        samples = [collated([each], self.collate) for part in split.flat for each in part]
        weights, stacked = self.reference.own(samples, replace(record, forwards=[]))
        if len({*weights[weights > 0]}) < 2:
            return {}
        parts = np.repeat(np.arange(len(split.flat)), [len(part) for part in split.flat])
        places = np.equal.outer(np.arange(len(split.flat)), parts).astype(np.float32)
        sums = {name: torch.from_numpy(places) @ each for name, each in stacked.items()}
        apart = [sums[name] - each.flatten(0, 1) for name, each in own.stacked.items()]
        squares = [
            sum(float(t.square().sum()) for t in each) for each in (apart, own.stacked.values())
        ]
        if squares[0] <= 1e-3 * squares[1]:
            means = torch.from_numpy(places * inverse(weights) / (weights > 0).sum())
            return {name: means @ each.double() for name, each in stacked.items()}
        problem = (
            "the loss of a microbatch is not the sum of those of its samples, because of dropout "
            "or batch statistics; call model.eval()"
        )
        require(self.weights != "samples", "weights", self.weights, problem)
        return {}
