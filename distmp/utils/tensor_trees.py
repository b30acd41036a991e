"""Describes and compares nested containers of tensors, and applies functions to their tensors."""

from __future__ import annotations

import copy
import re
import zlib
from collections import Counter, UserDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from distmp.errors import ConfigError
from distmp.utils.dtypes import dtype_name

# Longer lists are data, such as token ids.
_MOST_DESCRIBED = 8
_PLAIN = (type(None), bool, int, float, str)
T = TypeVar("T")


def described(tree: Any) -> str:
    """Return tensors with shapes and dtypes as text, such as `{inputs: int64 [4, 16]}`."""
    if isinstance(tree, Tensor):
        return f"{dtype_name(tree.dtype)} {list(tree.shape)}"
    if isinstance(tree, Mapping):
        entries = ", ".join(f"{key}: {described(value)}" for key, value in tree.items())
        return f"{{{entries}}}"
    if isinstance(tree, (tuple, list)) and len(tree) <= _MOST_DESCRIBED:
        return f"{type(tree).__name__} of {', '.join(map(described, tree))}"
    return type(tree).__name__ + (f" of {len(tree)}" if isinstance(tree, Sized) else "")


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return nested containers with each tensor replaced by the result of a function.

    Args:
        function: Called with each tensor.
        tree: A tensor, or nested containers of tensors and other objects, see torch's pytrees.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    # Common types without pytree, which takes longer than to launch several kernels: modules whose
    # inputs are cast would spend that in every forward.
    kind = type(tree)
    if kind in _PLAIN:
        return tree
    if kind in (tuple, list):
        return kind([map_tensors(function, item) for item in tree])
    if kind is dict:
        return {key: map_tensors(function, item) for key, item in tree.items()}
    if isinstance(tree, UserDict):  # from tokenizers; it is no pytree
        mapped = copy.copy(tree)
        mapped.data = map_tensors(function, tree.data)
        return mapped
    return pytree.tree_map_only((Tensor, UserDict), lambda leaf: map_tensors(function, leaf), tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers, see `map_tensors`."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, UserDict):
            yield from leaves(leaf.data)
        else:
            yield leaf


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers, see `map_tensors`."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def floating_point_cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that casts floating-point tensors and returns others unchanged."""
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def tied_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that have several names."""
    counts = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    return {parameter for parameter, count in counts.items() if count > 1}


def refuse_shared_memory(module: nn.Module, setting: str, value: str) -> None:
    """Refuse a parameter that shares memory with another tensor of the model.

    Another parameter would be trained separately; a buffer or an attribute would keep old values.

    Args:
        module: The model.
        setting: Name of the setting that moves parameters to other memory.
        value: Value of that setting.

    Raises:
        ConfigError: Naming the parameters.
    """
    others = (*module.named_buffers(), *_tensor_attributes(module))
    if shared := shared_memory(module.named_parameters(), others):
        problem = (
            f"would separate {shared[0]!r} and {shared[1]!r}, which share memory; assign one "
            "nn.Parameter to both modules, or make the view in forward"
        )
        raise ConfigError(setting, value, problem)


def shared_memory(
    parameters: Iterable[tuple[str, Tensor]], others: Iterable[tuple[str, Tensor]]
) -> tuple[str, str] | None:
    """Return the names of a parameter and another tensor that share memory; None if none do."""
    spans: dict[int, list[tuple[int, int, str, bool]]] = defaultdict(list)
    for is_parameter, tensors in ((True, parameters), (False, others)):
        for name, tensor in tensors:
            if not is_lazy(tensor) and tensor.layout == torch.strided and tensor.numel():
                of_storage = spans[tensor.untyped_storage()._cdata]
                of_storage.append((*_byte_range(tensor), name, is_parameter))
    for of_storage in spans.values():
        # The ends of the parameter, and of the other tensor, that reach furthest so far.
        furthest = {True: (0, ""), False: (0, "")}
        for start, end, name, is_parameter in sorted(of_storage):
            before = max(furthest.values()) if is_parameter else furthest[True]
            if start < before[0]:
                return before[1], name
            furthest[is_parameter] = max(furthest[is_parameter], (end, name))
    return None


def _tensor_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that are neither parameters nor buffers, with their names."""
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            # A hook, such as that of spectral_norm, computes such a tensor before each forward.
            if isinstance(value, Tensor) and not child._forward_pre_hooks:
                yield f"{prefix}.{name}".lstrip("."), value


def _byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one after the last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + int(last) + 1) * tensor.itemsize


def parameter_name(name: str) -> str:
    """Return a name in the plain model, without `torch.compile`, FSDP1 and checkpoint_wrapper."""
    return re.sub(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.", "", name)


def set_extra_state(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give each submodule its extra state; a load fills what `get_extra_state` returned.

    Args:
        module: The module.
        values: Tensors by their names in `module.state_dict()`, see `parameter_name`.
    """
    for prefix, part in module.named_modules():
        name = parameter_name(f"{prefix}._extra_state".removeprefix("."))
        if name in values and type(part).set_extra_state is not nn.Module.set_extra_state:
            part.set_extra_state(values[name])


class HeldTensor(NamedTuple):
    """A parameter or buffer under one of its names.

    Attributes:
        holder: The submodule in which it is registered.
        key: Its name there.
        name: Its full name in the module.
        tensor: The parameter or buffer.
    """

    holder: nn.Module
    key: str
    name: str
    tensor: Tensor


def held_tensors(module: nn.Module) -> Iterator[HeldTensor]:
    """Yield the parameters and buffers of a module; a tied one once for every name."""
    for prefix, part in module.named_modules():
        own = [
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *part.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for key, tensor in own:
            yield HeldTensor(part, key, f"{prefix}.{key}".lstrip("."), tensor)


def parameter_like(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Return a value as a parameter with the attributes that users have set on another one."""
    new = nn.Parameter(value, parameter.requires_grad)
    vars(new).update(added_attributes(parameter))
    return new


# Names of the attributes that torch itself sets on a type of tensors. Kept, because `detach` of a
# tensor without memory takes as long as to record an operation.
_SET_BY_TORCH: dict[type, set[str]] = {}


def added_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that users have set on a tensor."""
    kind = type(tensor)
    if kind not in _SET_BY_TORCH:
        _SET_BY_TORCH[kind] = {*vars(tensor.detach()), "_is_param"}
    known = _SET_BY_TORCH[kind]
    return {name: value for name, value in vars(tensor).items() if name not in known}


def replace_tensors(
    module: nn.Module,
    is_replaced: Callable[[Tensor], bool],
    replacement: Callable[[HeldTensor], Tensor],
) -> None:
    """Replace parameters and buffers of a module; tied ones stay tied.

    Args:
        module: The module, changed in place.
        is_replaced: Selects the parameters and buffers.
        replacement: Returns the new one. It is called with one name of a tied tensor.
    """
    done: dict[int, Tensor] = {}
    for held in held_tensors(module):
        if is_replaced(held.tensor):
            key = id(held.tensor)
            if key not in done:
                done[key] = replacement(held)
            setattr(held.holder, held.key, done[key])


_COMPARED_BY_REPR = (str, bytes, bool, int, float, complex, np.generic, type(None), Tensor)


def checksum(tree: Any, describe: Callable[[object], str] = repr, first: int | None = 2**16) -> int:
    """Return a checksum of nested containers, of 32 bits.

    Args:
        tree: Tensors, arrays, numbers and text in nested containers, see torch's pytrees. Of each
            tensor or array, the shape and the first elements count.
        describe: Returns the text that counts for any other object.
        first: Number of elements of each tensor or array that count; None for all.
    """
    value = 0
    for leaf in leaves(tree):
        for part in _parts(leaf, describe, first):
            value = zlib.crc32(part, value)
    return value


def _parts(leaf: Any, describe: Callable[[object], str], first: int | None) -> tuple[Any, ...]:
    # A sparse, nested or meta tensor cannot be flattened.
    flat = isinstance(leaf, Tensor) and not (leaf.is_nested or leaf.is_meta)
    if flat and leaf.layout == torch.strided:
        start = leaf.detach().flatten()[:first].cpu().resolve_conj().resolve_neg()
        start = start.clone(memory_format=torch.contiguous_format)
        return str(tuple(leaf.shape)).encode(), start.view(torch.uint8).numpy()
    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
        return str(leaf.shape).encode(), leaf.reshape(-1)[:first].tobytes()
    text = repr(leaf) if isinstance(leaf, _COMPARED_BY_REPR) else describe(leaf)
    return (text.encode(errors="backslashreplace"),)


def version_counters(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often torch has counted an in-place write to each tensor."""
    return list(map(attrgetter("_version"), tensors))


def under(prefix: str, entries: Mapping[str, T]) -> dict[str, T]:
    """Return the entries whose names begin with a prefix, without it."""
    return {n.removeprefix(prefix): entry for n, entry in entries.items() if n.startswith(prefix)}
