"""The blocks of a model, which are sharded, recomputed or compiled as one unit."""

# Note [Buffers and recomputation]
#
# A forward may write buffers, such as the running statistics of BatchNorm. The recomputation in
# backward must not write them a second time, and must not read values that were written since the
# first forward. So it runs on copies of the buffers with the values of the first forward. The
# copies are different tensors, because autograd keeps references to tensors that it needs for
# backward.
#
# Between forward and backward, only buffers that forward has written are held twice. A write is
# detected by the version counter of a tensor. Batch norm does not increment the version of its
# statistics; this is correct, because in training mode it writes them without reading them.

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distmp.errors import ConfigError, nearest, require
from distmp.parallel.settings import ParallelConfig
from distmp.precision.keep import forward_function, outermost
from distmp.utils.tensor_trees import tied_parameters

# The module that a buffer is registered in, and its name there.
_Buffer = tuple[nn.Module, str]


def has_buffers(block: nn.Module) -> bool:
    """Return whether a block has buffers, which its forward may write."""
    return any(True for _ in block.buffers())


def checkpoint_activations(block: nn.Module, backend: str | None = None) -> None:
    """Keep only the inputs of a block for backward, which recomputes its activations.

    It replaces `forward` of this object, so that parameter names do not change and FSDP's hooks,
    which gather parameters, run outside of the checkpointed function.

    Args:
        block: The module, changed in place.
        backend: Backend of `torch.compile` if the block or the full model will be compiled. The
            `forward` of a block with buffers is compiled here.
    """
    forward, buffers = forward_function(block), has_buffers(block)
    if buffers and backend is not None:
        # Compile `forward` itself. Compiling the block would leave the recomputation eager.
        forward = torch.compile(forward, backend=backend)

    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        options: dict[str, Any] = {"context_fn": partial(_contexts, self)} if buffers else {}
        # A partial, because torch.compile breaks the graph at a MethodType. With the keywords, as
        # `checkpoint` would take those that have the names of its own.
        bound = partial(forward, self, **kwargs)
        return checkpoint(bound, *args, use_reentrant=False, **options)

    # torch.compile supports checkpointing, but not the contexts for buffers. A bound method, so
    # that a deep copy calls its own module.
    block.forward = MethodType(torch.compiler.disable(recomputed) if buffers else recomputed, block)


def _registered(block: nn.Module) -> dict[_Buffer, Tensor]:
    return {
        (holder, name): buffer
        for holder in block.modules()
        for name, buffer in holder.named_buffers(recurse=False, remove_duplicate=False)
    }


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], _Recomputation]:
    """Return contexts of forward and recomputation, see Note [Buffers and recomputation]."""
    values: dict[_Buffer, Tensor] = {}
    return _kept_initial_values(block, values), _Recomputation(block, values)


@contextmanager
def _kept_initial_values(block: nn.Module, values: dict[_Buffer, Tensor]) -> Iterator[None]:
    """Add a copy of the initial value of each buffer that a forward writes to `values`."""
    before = _registered(block)
    versions = {key: buffer._version for key, buffer in before.items()}
    values.update((key, buffer.detach().clone()) for key, buffer in before.items())
    try:
        yield
    finally:
        after = _registered(block)
        for key, buffer in before.items():
            if after.get(key) is buffer and buffer._version == versions[key]:
                del values[key]


class _Recomputation:
    """Replaces the buffers of a block by copies; may be entered several times."""

    def __init__(self, block: nn.Module, values: dict[_Buffer, Tensor]) -> None:
        self._block = block
        self._values = values

    def __enter__(self) -> None:
        self._buffers = _registered(self._block)
        copies: dict[int, Tensor] = {}
        for key, buffer in self._buffers.items():
            if id(buffer) not in copies:  # one buffer may have several names
                copies[id(buffer)] = self._values.get(key, buffer).detach().clone()
            setattr(*key, copies[id(buffer)])

    def __exit__(self, *_: object) -> None:
        for key, buffer in self._buffers.items():
            setattr(*key, buffer)
        self._buffers = {}


# Modules that are never called themselves.
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# The name of a module up to its first number.
_ENTRY = re.compile(r"(.*?\.)?\d+(?=\.|$)")

logger = logging.getLogger("distmp")


def find_blocks(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in order of registration.

    Args:
        model: Any module.
        patterns: Patterns with `*` and `?` for class names or module names. If empty, blocks are
            the list entries that are or contain a module of the classes in the model's
            `_no_split_modules` (Hugging Face), or all entries of its outermost module lists; with
            them, modules of these classes outside of lists that have no tied parameter.

    Raises:
        ConfigError: If a pattern matches no module with parameters.
    """
    if patterns:
        return _matching(model, patterns)
    unsplit = {
        name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()
    }
    found = {name: part for name, part in _candidates(model) if type(part).__name__ in unsplit}
    entries = {name for name in found if name.split(".")[-1].isdigit()}
    known = tuple(f"{name}." for name in entries)
    # Some models name parts of their layers only: then the entries of lists that hold these.
    parts = [name for name in found if not f"{name}.".startswith(known)]
    entries |= {match[0] for match in map(_ENTRY.match, parts) if match}
    layers = {id(part) for name, part in _candidates(model) if name in entries}
    layers = layers or {id(part) for part in _entries_of_lists(model)}
    # Encoders name their embeddings, too. A tied one is used outside of its module.
    tied = tied_parameters(model)
    others = {
        id(part)
        for name, part in found.items()
        if not any(map(str.isdigit, name.split("."))) and tied.isdisjoint(part.parameters())
    }
    return {name: part for name, part in _candidates(model) if id(part) in layers | others}


def prepare_blocks(
    model: nn.Module, config: ParallelConfig, *, backend: str = "inductor", quiet: bool = False
) -> None:
    """Apply activation checkpointing and `torch.compile` in place; parameter names stay the same.

    Args:
        model: The model before it is sharded, so that a compiled block is gathered as one unit.
        config: The settings to apply.
        backend: Backend of `torch.compile`.
        quiet: Do not log, because another rank does.

    Raises:
        ConfigError: If the settings are for blocks and the model has none.
    """
    recomputes = config.activation_checkpointing == "blocks"
    if not recomputes and config.compile == "none":
        return
    blocks = outermost(model, find_blocks(model, config.sharding.wrap))
    for setting in ("compile", "activation_checkpointing"):
        require(bool(blocks) or getattr(config, setting) != "blocks", setting, "blocks", NO_BLOCKS)
    if recomputes:
        for block in blocks.values():
            checkpoint_activations(block, None if config.compile == "none" else backend)
    if config.compile == "blocks":
        for block in blocks.values():
            # The forward of a recomputed block with buffers is compiled already.
            if not (recomputes and has_buffers(block)):
                block.compile(backend=backend)
        for part in model.modules():
            # A model that computes its loss itself, see `distmp.models.linear_cross_entropy`.
            if hasattr(part, "loss_backend"):
                part.loss_backend = backend  # type: ignore[assignment]
    elif config.compile == "model":
        if not quiet:
            logger.warning(COMPILED_WHOLE)
        model.compile(backend=backend)


COMPILED_WHOLE = (
    "the whole model is compiled: all gradients are ready at the end of backward, so no reduction "
    "overlaps with it; compile its blocks instead (compile = 'blocks', or block.compile())"
)
NO_BLOCKS = (
    "the model has neither a module list nor _no_split_modules, so its blocks are unknown; name "
    "them in sharding.wrap"
)


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    candidates = list(_candidates(model))
    names = {type(part).__name__ for _, part in candidates}
    for pattern in patterns:
        if not any(_matches(pattern, name, part) for name, part in candidates):
            problem = f"matches no module; {nearest(pattern, names)}"
            raise ConfigError("sharding.wrap", pattern, problem)
    return {
        name: part
        for name, part in candidates
        if any(_matches(pattern, name, part) for pattern in patterns)
    }


def _matches(pattern: str, name: str, part: nn.Module) -> bool:
    return fnmatchcase(type(part).__name__, pattern) or fnmatchcase(name, pattern)


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return (
        (name, part)
        for name, part in model.named_modules()
        if name and not isinstance(part, CONTAINERS) and any(True for _ in part.parameters())
    )


def _entries_of_lists(module: nn.Module, *, in_list: bool = False) -> Iterator[nn.Module]:
    """Yield the entries of outermost module lists; lists and dictionaries in them are flattened."""
    for child in module.children():
        if isinstance(child, CONTAINERS if in_list else nn.ModuleList):
            yield from _entries_of_lists(child, in_list=True)
        elif not in_list:
            yield from _entries_of_lists(child)
        else:
            yield child
