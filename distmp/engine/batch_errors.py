"""Explains errors of the loss function or the model that come from the contents of a batch."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.engine.step_checks import LIST_ADVICE
from distmp.errors import ConfigError, listed
from distmp.utils.tensor_trees import described

KEY_ADVICE = "return it from the data set, or change the loss (model.loss) to read what is there"
# A string where a tensor is needed, and the arguments of a forward that do not fit.
_STRING = re.compile(r"not str\b|'str' object has no attribute")
_FORWARD = re.compile(r"forward\(\) (got an unexpected|missing|takes|got multiple)")


@contextmanager
def explain_batch_errors(batch: Any, model: nn.Module) -> Iterator[None]:
    """Explain errors of the loss function or the model that come from the contents of a batch.

    Raises:
        ConfigError: In place of a KeyError for a missing key of the batch, of an IndexError for an
            id above a vocabulary, of a TypeError for arguments that the model does not take, and of
            errors for a batch that the loss function takes for a container of another kind.
    """
    try:
        yield
    except ConfigError:
        raise
    except IndexError as error:
        if "out of range in self" not in str(error) and "out of bounds" not in str(error):
            raise
        raise ConfigError(
            "batch",
            _integer_ranges(batch),
            f"an id is too large: {error}; the model has embeddings of {_embedding_sizes(model)} "
            "rows",
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = _misread_batch(batch, error)
        if problem is None:
            raise
        raise ConfigError(*problem) from error


def _misread_batch(batch: Any, error: Exception) -> tuple[str, str, str] | None:
    """Return setting, value and advice for an error that a batch causes; None for other errors."""
    text, value = str(error), described(batch)
    if isinstance(batch, Mapping):
        if isinstance(error, KeyError):
            key = error.args[0] if error.args else None
            if key in batch or not _is_local_variable(batch, error):
                return None
            problem = (
                f"the loss function reads the key {key!r}, which the batch lacks; {KEY_ADVICE}"
            )
            return "batch", value, problem
        if "to unpack" in text or (_STRING.search(text) and _holds_a_key(batch, error)):
            problem = (
                f"the loss function takes keys for tensors ({text}); read batch['KEY'] instead"
            )
            return "batch", value, problem
    if isinstance(batch, tuple | list) and "indices must be integers" in text:
        problem = (
            f"the loss function reads it by keys ({text}); return dictionaries from the data set"
        )
        return "batch", value, problem
    if isinstance(batch, Tensor) and "values to unpack" in text:
        problem = (
            f"is one microbatch, and the loss function unpacks it ({text}); if it is a part of"
        )
        return "microbatches", value, f"{problem} a batch, {LIST_ADVICE}"
    if isinstance(error, TypeError) and _FORWARD.search(text):
        return "batch", value, f"the model does not take what the loss function passes: {text}"
    return None


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
