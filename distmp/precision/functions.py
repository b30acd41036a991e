"""Computes functions of torch in FP32 on 16-bit tensors, as autocast does, but by name.

Most functions of torch sum in FP32 already and round only their result; docs/precision.md lists
those that do not. Under a policy without autocast, `keep_fp32` may name them, as in `prod()`.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, get_overridable_functions
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from distmp.errors import ConfigError, did_you_mean
from distmp.precision.policy import SIXTEEN_BIT
from distmp.utils.frames import outwards
from distmp.utils.tensor_trees import map_tensors

# Functions whose result has the dtype of their first argument, whatever that of others such as
# weights, masks and grids; with others, torch promotes to FP32.
_UNPROMOTED = re.compile(
    r".*(_norm|attention|attention_forward)|prelu|grid_sample|lerp|index_add|masked_scatter|"
    r"embedding_bag|cross_entropy|nll_loss|type_as"
)


class Fp32Functions(TorchFunctionMode):
    """Calls the named functions with FP32 copies of 16-bit tensors.

    Results are rounded to the dtype that they have without the mode, which the next layer needs:
    16 bits, or that of `dtype=` and FP32 arguments. 0-dim results, such as losses, stay FP32 and do
    not overflow. Every other call of torch costs a few microseconds more, so the mode is entered
    only if the policy names functions.

    Args:
        names: Names of functions or methods, such as `prod` or `cross_entropy`.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = frozenset(names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removeprefix("special_")
        if name not in self._names:
            return func(*args, **kwargs)
        promotes = _UNPROMOTED.fullmatch(name) is None
        dtypes = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)]
        copies: list[Tensor] = []

        def in_fp32(tensor: Tensor) -> Tensor:
            is_16_bit = tensor.dtype in SIXTEEN_BIT
            is_fp32 = tensor.dtype == torch.float32 and tensor.dim() > 0
            if is_16_bit or (is_fp32 and promotes):
                dtypes.append(tensor.dtype)
            if is_16_bit:
                copies.append(tensor.float())
            return copies[-1] if is_16_bit else tensor

        result = func(*map_tensors(in_fp32, args), **map_tensors(in_fp32, kwargs))
        if not copies:
            return result
        if not torch.compiler.is_compiling():  # compiled code has no storages to compare
            _refuse_shared(name, copies, result)
            _refuse_recomputed(name)
        dtype = functools.reduce(torch.promote_types, dtypes)
        return map_tensors(lambda part: _rounded(part, dtype), result)


def _refuse_shared(name: str, copies: list[Tensor], result: Any) -> None:
    """Refuse a function that writes to its arguments, or returns a view of them.

    Raises:
        ConfigError: If so: the caller's tensors would not change.
    """
    written = any(not copy.is_inference() and copy._version for copy in copies)
    held = {copy.untyped_storage()._cdata: copy for copy in copies}
    is_view = any(
        held.get(part.untyped_storage()._cdata, part) is not part
        for part in pytree.tree_leaves(result)
        if isinstance(part, Tensor)
    )
    if written or is_view:
        does = "writes to its argument" if written else "returns a view of its argument"
        raise ConfigError(
            "precision.policy.keep_fp32",
            f"{name}()",
            f"{does}, which would be an FP32 copy, so the model would not see the change; name "
            "functions that return new values, and use inplace=False",
        )


def _refuse_recomputed(name: str) -> None:
    """Refuse a call inside of activation checkpointing.

    Raises:
        ConfigError: If so: backward would compute the function again outside of the mode.
    """
    file = checkpoint.__file__
    if any(frame.f_code.co_filename == file for frame in outwards(sys._getframe())):
        problem = (
            "is called in torch.utils.checkpoint, whose backward would compute it in 16 bits; put "
            "the call into a module and keep that, or do not recompute it"
        )
        raise ConfigError("precision.policy.keep_fp32", f"{name}()", problem)


@functools.cache
def known_functions() -> frozenset[str]:
    """Return the names of the functions that can be overridden."""
    functions = (each for of_module in get_overridable_functions().values() for each in of_module)
    return frozenset(getattr(each, "__name__", "") for each in functions)


def functions_in_fp32(names: Iterable[str]) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which functions compute in FP32; without names, none.

    Raises:
        ConfigError: If torch has no function of a name.
    """
    names = [*names]
    for name in names:
        if name not in known_functions():
            guess = did_you_mean(f"{name}()", (f"{known}()" for known in known_functions()))
            problem = guess or "torch has none"
        elif name.endswith("_"):
            problem = (
                "writes to its argument, which would be an FP32 copy; name a function that "
                "returns new values"
            )
        else:
            continue
        raise ConfigError("precision.policy.keep_fp32", f"{name}()", problem)
    return Fp32Functions(names) if names else contextlib.nullcontext()


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype == torch.float32 and tensor.dim() else tensor
