"""Explains an index out of range, such as a label outside of the vocabulary.

On a GPU the kernel fails after the host has continued, with an error that names neither the line
nor the batch, and every later call of CUDA fails too.
"""

from __future__ import annotations

import re
import traceback
from collections import UserDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import environ
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.errors import ConfigError, TrainingError, listed

_SIGNS = re.compile(
    r"device-side assert|index out of range in self|Target -?\d+ is out of bounds|"
    r"index -?\d+ is out of bounds"
)
_INTEGERS = (torch.int32, torch.int64)
# Not "/torch/": an environment or a directory of the user's may have this name.
_TORCH = f"{Path(torch.__file__).parent}/"
# The step that fails was launched last, or before that.
_STEPS_KEPT = 2


class LatestBatches:
    """Keeps the microbatches of the latest steps, to explain an index out of range.

    Args:
        model: The model, whose embeddings are named.
        rank: This rank.
        after_step: Whether to keep them after their step, for a device that reports errors later.

    Attributes:
        name: How messages call the next step; "" for its number.
    """

    def __init__(self, model: nn.Module, rank: int, *, after_step: bool) -> None:
        self.name = ""
        self._model, self._rank = model, rank
        self._after_step = after_step
        self._steps: deque[tuple[str, Sequence[Any]]] = deque(maxlen=_STEPS_KEPT)

    def add(self, step: int, microbatches: Sequence[Any]) -> None:
        """Keep the microbatches of the next step, which has this number."""
        self._steps.append((self.name or f"step {step}", microbatches))

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Explain an error of the block that comes from an index out of range.

        Raises:
            TrainingError: In place of that error, with the steps and the ranges of their integers.
            ConfigError: One about the batch, with the name of the step.
        """
        try:
            yield
            if not self._after_step:
                self._steps.clear()
        except ConfigError as error:
            if error.setting == "batch" and self._steps:
                error.args = (f"{error}; in {self._steps[-1][0]}",)
            raise
        except (IndexError, RuntimeError) as error:
            if isinstance(error, TrainingError) or not _SIGNS.search(str(error)):
                raise
            raise TrainingError(self._message(error)) from error

    def _message(self, error: Exception) -> str:
        on_gpu = "CUDA" in str(error)
        # Without this variable, the host fails at a later line.
        is_exact = not on_gpu or environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        frames = traceback.extract_tb(error.__traceback__)
        frame = [one for one in frames if not one.filename.startswith(_TORCH)][-1]
        steps = [*self._steps] if on_gpu else [*self._steps][-1:]
        rows = {m.num_embeddings for m in self._model.modules() if isinstance(m, nn.Embedding)}
        numbers = listed([*map(str, sorted(rows))])
        known = f"; the embeddings of the model have {numbers} rows" if rows else ""
        place = (
            f"it was raised in {frame.filename}:{frame.lineno}"
            if is_exact
            else "set CUDA_LAUNCH_BLOCKING=1 and run it again to find the line"
        )
        return "\n  - ".join(
            [
                f"an index is out of range on rank {self._rank} in "
                f"{' or '.join(name for name, _ in steps)}: {str(error).splitlines()[0]}",
                f"compare labels and token ids with the vocabulary or the classes{known}; labels "
                "that do not count are -100",
                *(f"{name}: {_ranges(batches)}" for name, batches in steps),
                place,
            ]
        )


def _ranges(microbatches: Sequence[Any]) -> str:
    """Return the ranges of integers as text, the largest first; after an error, only of the host's.

    Every call of CUDA fails after a failed kernel.
    """
    found = {
        f"microbatch {index}{pytree.keystr(path)}": (int(leaf.amax()), int(leaf.amin()))
        for index, batch in enumerate(microbatches, 1)
        for path, leaf in pytree.tree_leaves_with_path(
            batch.data if isinstance(batch, UserDict) else batch  # from tokenizers; it is no pytree
        )
        if isinstance(leaf, Tensor) and leaf.dtype in _INTEGERS and leaf.numel()
        if leaf.device.type == "cpu"
    }
    names = sorted(found, key=found.__getitem__, reverse=True)
    texts = [f"{name} from {found[name][1]} to {found[name][0]}" for name in names]
    return listed(texts) or "no integers on the host"
