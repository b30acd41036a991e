"""Explains errors of the loss function or the model that come from the contents of a batch."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from distmp.engine.step_checks import LIST_ADVICE
from distmp.errors import ConfigError, listed
from distmp.parallel.strategy import USED_DIRECTLY, uses_shard
from distmp.utils.tensor_trees import described

DICTIONARY_ADVICE = "return dictionaries from the dataset"
KEY_ADVICE = "return it from the dataset, or change the loss (model.loss) to read what is there"
# A string where a tensor is needed, and the arguments of a forward that do not fit.
_STRING = re.compile(r"not str\b|'str' object has no attribute")
_FORWARD = re.compile(r"forward\(\) (got an unexpected|missing|takes|got multiple)")
# A target of `cross_entropy` or `nll_loss` that is no class.
_TARGET = re.compile(r"Target -?\d+ is out of bounds")


@contextmanager
def explain_batch_errors(batch: Any, model: nn.Module) -> Iterator[None]:
    """Explain errors of the loss function or the model that come from the contents of a batch.

    Raises:
        ConfigError: In place of a RuntimeError for a parameter that FSDP has not gathered, of a
            KeyError for a missing key of the batch, of an IndexError for an id above a vocabulary
            or a target that is no class, of a TypeError for arguments that the model does not take,
            and of errors for a batch that the loss function takes for a container of another kind.
    """
    try:
        yield
    except ConfigError:
        raise
    except RuntimeError as error:
        if not uses_shard(error):
            raise
        raise ConfigError("loss", "DTensor", USED_DIRECTLY) from error
    except IndexError as error:
        problem = _bad_index(error, model)
        if problem is None:
            raise
        raise ConfigError("batch", _integer_ranges(batch), problem) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        misread = _misread_batch(batch, error, model)
        if misread is None:
            raise
        raise ConfigError(*misread) from error


def _bad_index(error: IndexError, model: nn.Module) -> str | None:
    """Return what is wrong with an index of the batch; None for other errors."""
    text = str(error).removesuffix(".")
    if _TARGET.match(text):
        classes = _classes(error)
        if classes is None:
            return f"{text}; the model returns fewer classes, or the target is negative"
        return f"{text}; the model returns {classes} classes: use targets from 0 to {classes - 1}"
    if "out of range in self" in text:  # of an embedding
        rows = _embedding_sizes(model)
        return f"an id is too large: {text}; the model has embeddings of {rows} rows"
    return f"an index is too large: {text}" if "out of bounds" in text else None


def _classes(error: IndexError) -> int | None:
    """Return the number of classes in the input of torch's loss that raised; None if unknown."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == functional.__name__:
            scores = frame.f_locals.get("input")
            if isinstance(scores, Tensor) and scores.ndim:
                return scores.shape[min(1, scores.ndim - 1)]
    return None


def _misread_batch(batch: Any, error: Exception, model: nn.Module) -> tuple[str, str, str] | None:
    """Return setting, value and advice for an error that a batch causes; None for other errors."""
    text = str(error)
    if isinstance(batch, Tensor) and "values to unpack" in text:
        problem = f"is one microbatch, and the loss function unpacks it ({text})"
        advice = f"if it is a part of a batch, {LIST_ADVICE}"
        return "microbatches", described(batch), f"{problem}; {advice}"
    problem = _misread_mapping(batch, error) if isinstance(batch, Mapping) else ""
    by_key = isinstance(batch, tuple | list) and "indices must be integers" in text
    if by_key and _is_local_variable(batch, error):
        problem = f"the loss function reads it by keys ({text}); {DICTIONARY_ADVICE}"
    if isinstance(error, TypeError) and _FORWARD.search(text) and _is_local_variable(model, error):
        takes = listed([*inspect.signature(model.forward).parameters])
        problem = f"the model does not take what the loss function passes: {text}; it takes {takes}"
    return ("batch", described(batch), problem) if problem else None


def _misread_mapping(batch: Mapping[Any, Any], error: Exception) -> str:
    """Return how a loss function misreads a dictionary; empty for errors of other causes."""
    if isinstance(error, KeyError):
        key = error.args[0] if error.args else None
        if key in batch or not _is_local_variable(batch, error):
            return ""
        return f"the loss function reads the key {key!r}, which the batch lacks; {KEY_ADVICE}"
    unpacked = _unpacks(len(batch), str(error)) and _is_local_variable(batch, error)
    if unpacked or (_STRING.search(str(error)) and _holds_a_key(batch, error)):
        return f"the loss function takes keys for tensors ({error}); read batch['KEY'] instead"
    return ""


def _unpacks(size: int, text: str) -> bool:
    """Return whether an error may come from unpacking `size` values."""
    found = re.search(r"values to unpack \(expected (?:at least )?(\d+)(?:, got (\d+))?", text)
    if found is None:
        return False
    return int(found[2]) == size if found[2] else size > int(found[1])


def _is_local_variable(value: Any, error: BaseException) -> bool:
    """Return whether the function that raised has `value` among its local variables."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return any(local is value for local in frame.f_locals.values())


def _holds_a_key(batch: Mapping[Any, Any], error: BaseException) -> bool:
    """Return whether a function on the way to an error has a key of the batch in a variable."""
    return any(
        isinstance(local, str) and local in batch
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for local in frame.f_locals.values()
    )


def _integer_ranges(batch: Any) -> str:
    """Return the range of each integer tensor, by its path in the batch."""
    leaves, _ = pytree.tree_flatten_with_path(batch)
    ranges = [
        f"{pytree.keystr(path)} from {leaf.min().item()} to {leaf.max().item()}".strip()
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_floating_point()
    ]
    return listed(ranges) or "no integers"


def _embedding_sizes(model: nn.Module) -> str:
    sizes = {
        module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)
    }
    return ", ".join(map(str, sorted(sizes))) or "unknown numbers of"
