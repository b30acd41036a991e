"""`check_gradient`: compares the gradient of a training step with float64."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from distmp.distributed.failing_together import Ranks
from distmp.errors import ConfigError, require
from distmp.testing import classify, gradients, recording
from distmp.testing.reference import LossSum, Reference, different_weights
from distmp.utils.tensor_trees import checksum

IGNORED = -100
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
    max_norm: float | None = None,
) -> None:
    """Check that a training step computes the gradient of the mean over all tokens or samples.

    In one process, the samples are divided over microbatches in several ways. If the default
    process group is initialized, they are divided over its ranks, too; every rank calls this
    function with the same samples.

    Args:
        train_step: Your code, called as `train_step(model, microbatches)` with the microbatches of
            this rank. It leaves gradients where the optimizer would find them, or returns them by
            name of parameter. Gradients are removed before each call. It may wrap the model, and
            change microbatches in place. If the model draws random numbers, as dropout does, it
            visits microbatches in their order, with one forward each, and does not compile.
        model: The model, plain or wrapped in DDP or FSDP.
        samples: At least three per rank, such as dicts of tensors with `labels` or pairs of inputs
            and labels; each without a batch dimension.
        weights: What the sum of losses is divided by: `tokens`, the weights that `loss_sum`
            returns; `samples`, which averages the mean losses of samples, or with `loss_sum` the
            same as `tokens`; `sum`, nothing.
        loss_sum: Returns the sum of the losses of a microbatch, and its weight, as the loss
            functions of `distmp.Engine` do. By default, the cross entropy over labels other than
            -100, and their number.
        collate: Makes a microbatch of a list of samples. By default, tensors are stacked.
        reference: A plain model with the same names of parameters, for a model that FSDP1 shards.
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
    problem = "FSDP1 flattens its parameters: pass a plain model of the same class as reference="
    plain, of_samples = reference or model, weights == "samples"
    require(not gradients.is_fsdp1(plain), "model", type(plain).__name__, problem)
    wanted = Reference(plain, loss_sum or partial(default_loss, of_samples=of_samples))
    other = None if loss_sum else Reference(plain, partial(default_loss, of_samples=not of_samples))
    extra = "accumulated_twice" if loss_sum else "token_mean" if of_samples else "sample_mean"
    ranks, results = Ranks(None), []
    # Of the weights before each step, which are too large to keep.
    sums: dict[str, list[int]] = defaultdict(list)
    for name, parts in make_splits([*samples], ranks.world_size, tokens=weights == "tokens"):
        each = len(parts) // ranks.world_size
        own = parts[ranks.rank * each :][:each]
        step = _recorded(train_step, model, [*map(collate or _stacked, own)])
        step.former, step.max_norm = other.mean(step) if other else {}, max_norm
        results.append(wanted.compared(name, step, extra, exact=True))
        for weight in step.gradients:
            sums[weight].append(checksum(step.state[weight], first=None))
    problem = "there is nothing to compare: pass others, with labels"
    require(any(split.weights.any() for split in results), "weights of samples", 0, problem)
    found = classify.diagnose(results, WANTED[weights])
    found += different_weights(sums)
    if found := classify.over_ranks(ranks.gather(found)):
        lines = [f"- {each.kind}: {each}" for each in found]
        raise classify.GradientError("\n".join(["the gradient is wrong:", *lines]), found)


def _stacked(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except RuntimeError as error:
        problem = f"cannot be stacked ({error}); pad them, or pass collate="
        raise ConfigError("samples", f"list of {len(samples)}", problem) from error


def _recorded(train_step: TrainStep, model: nn.Module, batches: Sequence[Any]) -> recording.Step:
    """Return what a training step used, and the full gradients; every rank has to call it."""
    step = recording.Step(Counter(), gradients.full_state(model))
    gradients.remove_gradients(model)
    with recording.recorded_steps(model, lambda: step, step.collectives), torch.random.fork_rng():
        returned = train_step(model, copy.deepcopy([*batches]))
    names = gradients.named_parameters(model).keys()
    given = returned if isinstance(returned, Mapping) and names & returned.keys() else None
    step.gradients = gradients.full_gradients(model, given)
    # With another number of forwards, it is unknown which belongs to which microbatch.
    known = len(step.forwards) == len(batches)
    states = [each.generators for each in step.forwards] if known else [()] * len(batches)
    autocast = next((each.autocast for each in step.forwards if each.autocast), None)
    used = zip(batches, states, strict=True)
    step.forwards = [recording.Forward([batch], {}, state, autocast) for batch, state in used]
    return step


class _LossCalls(TorchFunctionMode):
    """Lists calls of loss functions: function, and arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (arguments := recording.loss_arguments(func, args, kwargs)) and result.requires_grad:
            self.calls.append((func, arguments))
        return result


def default_loss(model: nn.Module, batch: Any, of_samples: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses of a microbatch, and their number.

    The loss is the one of torch that the model calls, or the cross entropy over labels other than
    -100.

    Args:
        model: The model.
        batch: A mapping with `labels`, which the model takes as keywords, or a pair of inputs and
            integer labels.
        of_samples: Whether to return the sum of the mean losses of samples, and their number.
    """
    labels = labels_of(batch)
    keys = [*batch] if isinstance(batch, Mapping) else type(batch).__name__
    problem = f"neither a mapping with labels nor inputs and integer labels; {recording.PASS}"
    require(labels is not None, "microbatch", keys, problem)
    if isinstance(batch, Mapping):
        with _LossCalls() as losses:
            model(**batch)
        problem = f"are not one; {recording.PASS}"
        require(len(losses.calls) == 1, "loss functions in forward", len(losses.calls), problem)
        function, arguments = losses.calls[0]
    else:
        logits = model(batch[0]).flatten(0, -2)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        function = cross_entropy
        arguments = recording.loss_arguments(function, [logits, labels.flatten()], {})
    single = function(**{**arguments, "reduction": "none"})
    counted = recording.counted_losses(function, arguments)
    sums, tokens = (part.reshape(len(labels), -1).sum(1) for part in (single, counted))
    if of_samples:
        return (sums / tokens.clamp(min=1)).sum(), (tokens > 0).sum()
    return sums.sum(), tokens.sum()


def _are_classes(labels: Any) -> bool:
    return isinstance(labels, Tensor) and not labels.is_floating_point()


def labels_of(batch: Any) -> Any:
    """Return the labels of a mapping, or the integer labels of a pair; None without them."""
    if isinstance(batch, Mapping):
        return batch.get("labels")
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    return batch[1] if is_pair and _are_classes(batch[1]) else None


# Relative numbers of samples of consecutive microbatches.
_PATTERN = (1, 3, 2, 5, 1, 4)
Parts = list[list[Any]]


def make_splits(samples: Sequence[Any], ranks: int, *, tokens: bool) -> Iterator[tuple[str, Parts]]:
    """Yield divisions of samples, with what is special about each.

    A division has the samples of each microbatch, those of rank 0 first.

    Args:
        samples: The samples, the same on every rank.
        ranks: Number of ranks.
        tokens: Whether there are divisions in which microbatches or a rank have no labels.

    Raises:
        ConfigError: If there are too few samples for three microbatches on each rank.
    """
    problem = f"pass at least {3 * ranks} samples, for three microbatches on each rank"
    require(len(samples) >= 3 * ranks, "number of samples", len(samples), problem)
    for count in (1, 2, 3):
        name = f"{count} uneven microbatch{'es' * (count > 1)} per rank"
        yield name, _divided(samples, ranks * count)
    parts = _divided(samples, 2 * ranks)
    if tokens and all(_are_classes(labels_of(sample)) for sample in samples):
        masked = [[*map(_without_labels, part)] for part in parts]
        yield "a microbatch without labels", [masked[0], *parts[1:]]
        if ranks > 1:
            yield "a rank without labels", [*parts[:-2], *masked[-2:]]


def _divided(samples: Sequence[Any], parts: int) -> Parts:
    """Return consecutive samples, at least one each, in sizes as uneven as `_PATTERN`."""
    shares = np.cumsum(np.resize(_PATTERN, parts))
    ends = np.round(shares / shares[-1] * (len(samples) - parts)).astype(int) + 1 + np.arange(parts)
    return [[*samples[start:end]] for start, end in itertools.pairwise([0, *ends])]


def _without_labels(sample: Any) -> Any:
    """Return the sample with all labels ignored."""
    ignored = torch.full_like(labels_of(sample), IGNORED)
    return {**sample, "labels": ignored} if isinstance(sample, Mapping) else (sample[0], ignored)
