"""Keeps modules in FP32 under a policy that computes in 16 bits.

A kept module has FP32 parameters and buffers, gets FP32 inputs, and computes with autocast
disabled. For functions (`torch.prod` in a forward) see `distmp.precision.functions`.

Example:
    >>> import torch
    >>> from distmp.precision.keep import kept_modules
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    >>> list(kept_modules(model, ["norm"]))
    ['1']
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from distmp.errors import ConfigError, TrainingError, did_you_mean, require
from distmp.precision.functions import known_functions
from distmp.precision.policy import SIXTEEN_BIT, PrecisionPolicy
from distmp.utils.tensor_trees import floating_point_cast, map_tensors

# Words for common kinds of modules. Each matches the last part of a module's name, or its class.
_NAMES = {
    "router": re.compile(r"(.*_)?router|gate"),
    "head": re.compile(r"(.*_)?heads?|classifier|score|embed_out|unembed(ding)?"),
}
_CLASSES = {
    "norm": re.compile(r"(?!Pre|Post).*Norm(\dd)?"),
    "softmax": re.compile(r".*Softmax.*"),
    "router": re.compile(r".*Router"),
    "head": re.compile(r".*(LM|Classification|Output)Head"),
    "loss": re.compile(r".*Loss"),
}
WORDS = tuple(sorted(_CLASSES))


def kept_modules(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """Return the outermost modules that match a pattern, by name.

    A pattern is one of the words `norm`, `softmax`, `router`, `head`, `loss`, or a glob for dotted
    names (`blocks.*.norm`, where `*` also matches dots) or classes (`LayerNorm`) of modules.
    A container that is never called (`ModuleList`) is replaced by its entries. The projection of a
    `torch.nn.MultiheadAttention` is never called either, and is replaced by the attention. A module
    that shares a parameter with a kept one is kept, too: the parameter exists once, in FP32.

    Args:
        module: The root module; it cannot be kept itself.
        patterns: Patterns of the modules to keep.

    Raises:
        ConfigError: If a pattern matches nothing (with the nearest name), the root module, or a
            module whose parameters are used without calling it.
    """
    kept: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = matching_modules(module, pattern, "precision.policy.keep_fp32")
        for name, part in [*matching.items()]:
            if isinstance(part, NonDynamicallyQuantizableLinear):  # its attention does not call it
                parent = name.rpartition(".")[0]
                matching[parent] = module.get_submodule(parent)
                del matching[name]
        problem = "keeps the whole model; use the policy fp32"
        require("" not in matching, "precision.policy.keep_fp32", pattern, problem)
        for name, part in matching.items():
            kept.update(_called(name, part, pattern))
    while shared := _sharing(module, kept):
        kept.update(shared)
    return outermost(module, kept)


def matching_modules(
    module: nn.Module, pattern: str, setting: str, *, optional: bool = False
) -> dict[str, nn.Module]:
    """Return the modules that match a pattern, by name; see `kept_modules` for the patterns.

    Args:
        module: The root module.
        pattern: The pattern.
        setting: Name of the setting, for the error.
        optional: Whether the pattern may match nothing.

    Raises:
        ConfigError: If it matches nothing, with the nearest name.
    """
    matching = {
        name: part for name, part in module.named_modules() if _matches(pattern, name, part)
    }
    if not matching and not optional:
        raise ConfigError(setting, pattern, _no_match(module, pattern))
    return matching


def modules_in_fp32(module: nn.Module, policy: PrecisionPolicy) -> dict[str, nn.Module]:
    """Return the modules that run in FP32 under a policy with 16 bits, by name.

    These are the modules that the policy keeps. With 16-bit parameters and without a 16-bit
    `buffer_dtype`, they include normalization layers with running statistics: a batch norm refuses
    FP32 statistics with 16-bit weights, and 16-bit statistics stop following the data. They also
    include layers whose weight is computed from buffers, which fails in two dtypes.

    Raises:
        ConfigError: See `kept_modules`.
    """
    kept = kept_modules(module, policy.kept_module_patterns)
    if policy.casts_parameters and policy.buffer_dtype not in SIXTEEN_BIT:
        for name, part in module.named_modules():
            if name and (getattr(part, "running_mean", None) is not None or _is_computed(part)):
                kept[name] = part
    return outermost(module, kept)


def _is_computed(part: nn.Module) -> bool:
    """Return whether a weight is computed from FP32 buffers (spectral_norm, orthogonal)."""
    parametrizations = getattr(part, "parametrizations", None)
    if parametrizations is None:
        return hasattr(part, "weight_u")  # torch.nn.utils.spectral_norm
    return any(True for _ in parametrizations.buffers())


def parameters_in_fp32(module: nn.Module, policy: PrecisionPolicy) -> set[int]:
    """Return the `id` of each parameter of `modules_in_fp32`, which raises the same errors."""
    kept = modules_in_fp32(module, policy).values()
    return {id(parameter) for part in kept for parameter in part.parameters()}


def storage_dtypes(module: nn.Module, policy: PrecisionPolicy) -> dict[str, torch.dtype]:
    """Return the dtype in which the module holds each parameter, by name.

    A 16-bit parameter has an FP32 master weight if the policy has master weights. Integer
    parameters keep their dtype, and so do frozen ones (a 16-bit base model) if the policy has FP32
    parameters.

    Raises:
        ConfigError: See `kept_modules`.
    """
    in_fp32 = parameters_in_fp32(module, policy)
    return {
        name: storage_dtype(parameter, policy, kept=id(parameter) in in_fp32)
        for name, parameter in module.named_parameters()
    }


def storage_dtype(parameter: Tensor, policy: PrecisionPolicy, *, kept: bool) -> torch.dtype:
    """Return the dtype in which a module holds a parameter, see `storage_dtypes`."""
    is_converted = kept or policy.casts_parameters or parameter.requires_grad
    if not (parameter.is_floating_point() and is_converted):
        return parameter.dtype
    return torch.float32 if kept else policy.module_dtype


def cast_buffers(module: nn.Module, policy: PrecisionPolicy) -> None:
    """Cast floating-point buffers to the `buffer_dtype` of the policy, in place.

    Buffers of kept modules are cast to FP32 in any case.

    Raises:
        ConfigError: See `kept_modules`.
    """
    in_fp32 = {
        id(buffer) for part in modules_in_fp32(module, policy).values() for buffer in part.buffers()
    }
    for buffer in module.buffers():
        dtype = torch.float32 if id(buffer) in in_fp32 else policy.buffer_dtype
        if dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def keep_in_fp32(
    module: nn.Module, policy: PrecisionPolicy, device_type: str
) -> dict[str, nn.Module]:
    """Make the modules that the policy keeps compute in FP32; their parameters are not changed.

    With 16-bit parameters, kept modules return `compute_dtype`, the input dtype of the next layer.
    Heads and losses return FP32, because no layer with parameters follows. Under autocast all of
    them return FP32, like autocast's FP32 operations.

    Args:
        module: The root module.
        policy: The precision policy.
        device_type: Device type of the module: "cuda", "cpu".

    Returns:
        The kept modules by name.

    Raises:
        ConfigError: See `kept_modules`.
    """
    kept = modules_in_fp32(module, policy)
    for name, part in kept.items():
        last = any(_matches(word, name, part) for word in ("head", "loss"))
        returns = None if policy.autocast or last else policy.compute_dtype
        run_in_fp32(part, device_type, returns)
    return kept


# Attribute of modules whose inputs are cast to FP32. Without it they compute in any dtype.
FP32_INPUTS = "_fp32_inputs"


def run_in_fp32(
    module: nn.Module, device_type: str, output_dtype: torch.dtype | None = None
) -> None:
    """Make `module` compute in FP32: cast its inputs to FP32 and disable autocast inside.

    Works with `copy.deepcopy`, `torch.compile`, activation checkpointing, FSDP1 and FSDP2. What the
    module writes to its arguments in place reaches the caller, except in compiled code, through
    `.data`, and if two of them share memory. Under FSDP2, torch refuses such writes.

    Args:
        module: A module that holds FP32 parameters when it is called.
        device_type: Device type of the module: "cuda", "cpu".
        output_dtype: Dtype of its floating-point outputs; None leaves them in FP32.
    """
    forward = forward_function(module)

    def in_fp32(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        copies: list[_Copy] = []
        with torch.autocast(device_type, enabled=False):
            if hasattr(self, FP32_INPUTS):
                cast = partial(_cast_to_fp32, copies)
                args, kwargs = map_tensors(cast, args), map_tensors(cast, kwargs)
            output = forward(self, *args, **kwargs)
        for each in copies:
            each.write_back()
        return output

    # A bound method, so that a deep copy calls its own module. Wraps the forward, as with hooks
    # autocast would stay disabled after an exception.
    module.forward = MethodType(in_fp32, module)
    vars(module)[FP32_INPUTS] = CastHook(torch.float32)  # a pickle would have lost the forward
    if output_dtype is not None:
        cast_outputs(module, output_dtype)


class _Copy(NamedTuple):
    """An argument, the copy of it that a kept module gets, and the version of the copy."""

    argument: Tensor
    copy: Tensor
    version: int

    def write_back(self) -> None:
        """Write the values that the module has written to its copy to the argument."""
        argument, copy, version = self
        if copy._version == version or copy.shape != argument.shape:
            return
        # A leaf can be written to only without its gradient, as the module has done.
        is_leaf = argument.is_leaf and argument.requires_grad
        (argument.detach() if is_leaf else argument).copy_(copy)


def _cast_to_fp32(copies: list[_Copy], tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in FP32, and add it to the copies if it is one."""
    if torch.compiler.is_compiling():  # compiled code has no versions to compare
        return _to_fp32(tensor)
    # A tensor that is created in inference mode has no version.
    inference = torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if inference else contextlib.nullcontext():
        copy = _to_fp32(tensor)
    if copy is not tensor:
        copies.append(_Copy(tensor, copy, copy._version))
    return copy


_to_fp32 = floating_point_cast(torch.float32)


def forward_function(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module as a function of the module, which deep copies can share.

    Args:
        module: The module. If another tool has replaced its forward by a function that is not a
            method of the module, that function is called for every module.
    """
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return forward.__func__
    return lambda _, *args, **kwargs: forward(*args, **kwargs)


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Register a hook that casts floating-point inputs of a module."""
    module.register_forward_pre_hook(_InputCast(dtype), with_kwargs=True)


def refuse_pickling(*_: object) -> NoReturn:
    """Refuse to pickle a prepared module, which has hooks and copies of weights.

    Raises:
        TrainingError: Always.
    """
    raise TrainingError(
        "a prepared model cannot be pickled (torch.save); save its state_dict(), or with "
        "distmp.Engine use engine.export(directory) or engine.save(directory)"
    )


class CastHook:
    """A hook that casts inputs or outputs; modules with it can be copied, but not pickled."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._cast = floating_point_cast(dtype)

    def __deepcopy__(self, memo: object) -> CastHook:
        return self

    __reduce_ex__ = refuse_pickling


class _InputCast(CastHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(self._cast, args), map_tensors(self._cast, kwargs)


class _OutputCast(CastHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(self._cast, output)


def cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Register a hook that casts floating-point outputs of a module."""
    module.register_forward_hook(_OutputCast(dtype))


def is_prepared(module: nn.Module) -> bool:
    """Return whether a policy was applied to a module, or to the module that it is a copy of."""
    return any(isinstance(hook, CastHook) for hook in module._forward_hooks.values())


def _matches(pattern: str, name: str, part: nn.Module) -> bool:
    last = name.rpartition(".")[2]
    class_name = type(part).__name__
    for words, text in ((_NAMES, last), (_CLASSES, class_name)):
        if pattern in words and words[pattern].fullmatch(text):
            return True
    return (name != "" and fnmatchcase(name, pattern)) or fnmatchcase(class_name, pattern)


def _no_match(module: nn.Module, pattern: str) -> str:
    parts = [(name, part) for name, part in module.named_modules() if name]
    if not parts:
        return "the model has no parts"
    names = {name.rpartition(".")[2] for name, _ in parts} | {name for name, _ in parts}
    classes = {type(part).__name__ for _, part in parts}
    words = [word for word in WORDS if any(_matches(word, name, part) for name, part in parts)]
    if pattern in known_functions():
        return f"matches no module of the model; for the function of torch, write '{pattern}()'"
    matching = f"; words that match: {', '.join(words)}" if words else ""
    guess = did_you_mean(pattern, {*names, *classes, *words} - {pattern})
    guess = guess or f"write a name such as {parts[-1][0]!r}, or a class{matching}"
    return f"matches no module of the model; {guess}"


def _called(name: str, part: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module; if it is a container that is never called, its called descendants."""
    if type(part).forward is not nn.Module.forward:
        yield name, part
        return
    problem = (
        f"{name!r} ({type(part).__name__}) holds parameters but is never called; keep the module "
        "that uses them"
    )
    holds = any(True for _ in part.parameters(recurse=False))
    require(not holds, "precision.policy.keep_fp32", pattern, problem)
    for child_name, child in part.named_children():
        yield from _called(f"{name}.{child_name}", child, pattern)


def _sharing(module: nn.Module, kept: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that share a parameter with a kept module and are not kept."""
    inside = with_submodules(kept.values())
    in_fp32 = {id(parameter) for top in kept.values() for parameter in top.parameters()}
    sharing = {
        name: part
        for name, part in module.named_modules()
        if id(part) not in inside
        and any(id(parameter) in in_fp32 for parameter in part.parameters(recurse=False))
    }
    if "" in sharing:
        names = [
            name for name, value in module.named_parameters(recurse=False) if id(value) in in_fp32
        ]
        problem = (
            f"shares its parameter with {names[0]!r} of the outermost module; use the policy fp32, "
            "or give each of them its own parameter"
        )
        raise ConfigError("precision.policy.keep_fp32", next(iter(kept)), problem)
    return sharing


def with_submodules(modules: Iterable[nn.Module]) -> set[int]:
    """Return the `id` of each module and of the modules inside of it."""
    return {id(part) for module in modules for part in module.modules()}


def outermost(module: nn.Module, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that are not inside another one of them, in order of registration."""
    inside = {id(part) for top in modules.values() for part in top.modules() if part is not top}
    tops = set(map(id, modules.values())) - inside
    return {name: part for name, part in module.named_modules() if id(part) in tops}


_BACKENDS = torch.backends
# torch's switches for FP32 products: "ieee", "tf32", "bf16" or "none" (not set).
_FP32_PRODUCTS: tuple[Any, ...] = (
    _BACKENDS.cuda.matmul,
    _BACKENDS.cudnn.conv,  # type: ignore[attr-defined]
    _BACKENDS.cudnn.rnn,
    _BACKENDS.mkldnn.matmul,  # type: ignore[attr-defined]
)
# Whether partial sums of 16-bit products may be rounded to 16 bits.
_REDUCED_SUMS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextlib.contextmanager
def product_switches(policy: PrecisionPolicy) -> Iterator[None]:
    """Set the switches of the policy inside the block, and restore the former ones after it.

    FP32 products (matrix, convolution, recurrent) use TF32 if the policy has `tf32`, and full
    precision otherwise; torch's default rounds the inputs of convolutions. Partial sums of 16-bit
    products stay in FP32; torch's default lets cuBLAS round them.
    """
    with contextlib.ExitStack() as previous:
        _remember(previous)
        # torch refuses to read its older switches if only the newer ones were set. The older
        # functions set both.
        torch.set_float32_matmul_precision("high" if policy.tf32 else "highest")
        _BACKENDS.cudnn.allow_tf32 = policy.tf32
        for products in _FP32_PRODUCTS:
            products.fp32_precision = "tf32" if policy.tf32 else "ieee"
        for name in _REDUCED_SUMS:
            setattr(_BACKENDS.cuda.matmul, name, False)
        yield


def _remember(stack: contextlib.ExitStack) -> None:
    """Register callbacks that restore every switch, in reverse order."""
    for products in _FP32_PRODUCTS:
        stack.callback(setattr, products, "fp32_precision", products.fp32_precision)
    for name in _REDUCED_SUMS:
        value = getattr(_BACKENDS.cuda.matmul, name)
        # Newer versions of torch have a second switch, which setting the first resets to its
        # default unless both are set.
        split_k = getattr(_BACKENDS.cuda.matmul, f"{name}_split_k", None)
        stack.callback(
            setattr, _BACKENDS.cuda.matmul, name, value if split_k is None else (value, split_k)
        )
    # Unreadable if only the newer switches were set; then only those are used.
    with contextlib.suppress(RuntimeError):
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    with contextlib.suppress(RuntimeError):
        stack.callback(setattr, _BACKENDS.cudnn, "allow_tf32", _BACKENDS.cudnn.allow_tf32)
