"""Checks of the arguments of a step and of the results of the loss function.

Each error message names the value received and the value expected. Checks that cost more than a few
comparisons on the host run only in the first step (`distmp.engine.likely_mistakes.FirstStep`).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from distmp.data.dataloader import DataLoader
from distmp.data.evaluation import ForwardOnly
from distmp.errors import ConfigError, require
from distmp.parallel.strategy import USED_DIRECTLY
from distmp.precision.policy import PrecisionPolicy
from distmp.utils.dtypes import dtype_name
from distmp.utils.imports import check_arguments
from distmp.utils.tensor_trees import tensors_in

LIST_ADVICE = "pass a list of microbatches: engine.step([batch]) or engine.step([batch, batch])"
LOSS_CONTRACT = (
    "return (loss_sum, weight): the loss summed over samples or tokens, and their number"
)
LOADER_ADVICE = (
    "iterate over a distmp.DataLoader, which yields lists of microbatches, or pass n batches of "
    "one iterator: engine.step(itertools.islice(iterator, n), count=n)"
)
ITERABLE_ADVICE = "pass an iterable of microbatches: engine.evaluate([batch, batch])"
LOSS_ADVICE = (
    "pass a function loss(module, batch) that runs module(...) and returns (loss_sum, weight): "
    "Engine(model, loss, optimizer)"
)

FREED = (
    "an earlier backward has freed it; the loss function must not call backward, and must compute "
    "a new graph for each microbatch (detach a state that it carries over)"
)
RESHARDED = (
    "FSDP frees the gathered parameters at the end of the first backward or torch.autograd.grad "
    "through them, so a gradient penalty cannot run a second one; compute derivatives by inputs "
    "with torch.func.jvp, or use the strategy 'ddp'"
)
# What torch says about linear layers, and about convolutions.
_DTYPES_DIFFER = re.compile(r"have the same dtype|type \(.*\) should be the same")
MIXED_DTYPES = (
    "parameters have 16 bits, so create tensors in forward in an input's dtype (dtype=x.dtype), "
    "keep their module in FP32 (keep_fp32=...) and call it, or use an autocast policy"
)


def listed_microbatches(microbatches: Any, count: int | None) -> list[Any]:
    """Return the microbatches of a step as a list; refuse other types of arguments.

    Args:
        microbatches: A list of microbatches, or an iterable of them.
        count: Number of microbatches; needed for an iterable without a length.

    Raises:
        ConfigError: With the value received.
    """
    shown = _describe(microbatches)
    valid = count is None or (type(count) is int and count >= 1)
    require(valid, "count", count, "use an integer of 1 or more, the number of microbatches")
    # The iterator of torch's loader has the length of the loader, so check the type.
    whole = isinstance(microbatches, TorchDataLoader | _BaseDataLoaderIter | Dataset | DataLoader)
    problem = f"gives all batches of an epoch, not the microbatches of one step; {LOADER_ADVICE}"
    require(not whole, "microbatches", shown, problem)
    refuse_one_batch(microbatches, LIST_ADVICE)
    is_usable = isinstance(microbatches, Iterable) and not isinstance(microbatches, str | Set)
    problem = (
        "has no length; pass a list, or the number of microbatches: "
        "engine.step(itertools.islice(iterator, n), count=n)"
    )
    has_length = count is not None or isinstance(microbatches, Sized)
    require(is_usable and has_length, "microbatches", shown, problem)
    listed, versions = [], []
    for batch in itertools.islice(microbatches, count and count + 1):
        listed.append(batch)
        versions.append(_versions(batch))
    problem = (
        "has overwritten a microbatch while the next one was read, and a step reads all of them "
        "first; yield new tensors, such as buffer.clone()"
    )
    require(versions == [*map(_versions, listed)], "microbatches", shown, problem)
    if count is not None and count != len(listed):
        found = "more" if len(listed) > count else len(listed)
        raise ConfigError("count", count, f"there are {found} microbatches; {LOADER_ADVICE}")
    trained = not any(isinstance(item, ForwardOnly) for item in listed)
    problem = f"is for engine.evaluate; {LOADER_ADVICE}"
    require(trained, "microbatches", "loader.once()", problem)
    problem = "is empty; a step needs at least one microbatch on every rank"
    require(bool(listed), "microbatches", [], problem)
    return listed


def _versions(batch: Any) -> list[int]:
    """Return how often each tensor of a batch has been written to."""
    return [tensor._version for tensor in tensors_in(batch) if not tensor.is_inference()]


def refuse_one_batch(microbatches: Any, advice: str = ITERABLE_ADVICE) -> None:
    """Refuse a single batch, or a loader of steps, in place of microbatches.

    Raises:
        ConfigError: With the value received.
    """
    problem = "yields lists of microbatches, for engine.step; pass loader.once()"
    require(not isinstance(microbatches, DataLoader), "microbatches", "DataLoader", problem)
    if isinstance(microbatches, Tensor | np.ndarray | Mapping) or hasattr(microbatches, "_fields"):
        raise ConfigError("microbatches", _describe(microbatches), f"is one batch; {advice}")
    if not isinstance(microbatches, list | tuple):
        return
    tensors = [item for item in microbatches[:2] if isinstance(item, Tensor)]
    same_type = len({(tensor.dtype, tensor.dim()) for tensor in tensors}) <= 1
    if len(tensors) == 2 and (isinstance(microbatches, tuple) or not same_type):
        shown = f"({', '.join(map(_describe, microbatches))})"
        problem = f"looks like one batch, such as (inputs, targets); {advice}"
        raise ConfigError("microbatches", shown, problem)


def check_loss_function(loss: object) -> None:
    """Refuse a value that cannot be called as `loss(module, batch)`.

    Raises:
        ConfigError: With the value received.
    """
    name = getattr(loss, "__name__", type(loss).__name__)
    if not callable(loss) or isinstance(loss, type | nn.modules.loss._Loss):
        raise ConfigError("loss", name, f"is not a function; {LOSS_ADVICE}")
    check_arguments("loss", name, loss, ("module", "batch"), f"{{reason}}; {LOSS_ADVICE}")


def check_loss(returned: Any) -> tuple[Tensor, Tensor | float]:
    """Return the loss sum and the weight that a loss function has returned, as 0-dim values.

    Raises:
        ConfigError: If they are not a differentiable loss of one element and a number.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise _wrong_loss(returned, f"the loss function returned this; {LOSS_CONTRACT}")
    loss, weight = returned
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        problem = "is not a tensor of one floating-point number; return the sum, loss.sum()"
        raise _wrong_loss(loss, problem)
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise _wrong_loss(
            loss,
            "does not depend on any parameter that is trained; return a loss of the model's "
            "output without detach(), multiplied by 0 for a batch without targets (torch's "
            "checkpoint needs use_reentrant=False)",
        )
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        return loss.reshape(()), weight.reshape(())
    if not isinstance(weight, int | float | np.number):
        raise ConfigError("weight", _describe(weight), f"is not one number; {LOSS_CONTRACT}")
    if weight < 0:  # a call less in every microbatch
        check_weight(float(weight))
    return loss.reshape(()), float(weight)


def _wrong_loss(value: Any, problem: str) -> ConfigError:
    return ConfigError("loss", _describe(value), problem)


def check_weight(weight: float) -> None:
    """Refuse a negative weight. A non-finite weight counts as an overflow instead.

    Raises:
        ConfigError: If the weight is finite and below 0.
    """
    problem = "is below 0; return the number of samples or tokens in the sum"
    require(not -math.inf < weight < 0, "weight", weight, problem)


@contextmanager
def explain_graph_errors(policy: PrecisionPolicy | None = None) -> Iterator[None]:
    """Explain errors of a graph with sharded parameters, or freed ones, and of mixed dtypes.

    Args:
        policy: The policy of a forward.

    Raises:
        ConfigError: In place of a RuntimeError for a parameter that FSDP has not gathered, for a
            graph that another backward has freed, or that needs parameters which FSDP has freed
            since the forward, and for an FP32 tensor that meets 16-bit parameters.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise ConfigError("loss", "DTensor", USED_DIRECTLY) from error
        if "out of bounds for storage of size 0" in str(error):
            raise ConfigError("loss", "graph without its parameters", RESHARDED) from error
        if "through the graph a second time" in str(error):
            raise ConfigError("loss", "Tensor of a graph that is freed", FREED) from error
        if policy is not None and policy.casts_parameters and _DTYPES_DIFFER.search(str(error)):
            problem = f"{str(error).splitlines()[0]}; {MIXED_DTYPES}"
            raise ConfigError("precision.policy", policy.name, problem) from error
        raise


def check_gradients_enabled() -> None:
    """Refuse a step without gradients.

    Raises:
        ConfigError: Inside of `torch.no_grad` or `torch.inference_mode`.
    """
    problem = "a step needs gradients; leave the context first"
    require(torch.is_grad_enabled(), "torch.no_grad()", True, problem)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"Tensor of shape {tuple(value.shape)} and {dtype_name(value.dtype)}"
    return f"{type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")
