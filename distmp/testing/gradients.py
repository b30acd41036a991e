"""Reads full parameters and gradients under any wrapper, and computes without wrappers."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.utils.stateless import _reparametrize_module

from distmp.precision.keep import FP32_INPUTS, CastHook
from distmp.utils.dtypes import is_dtensor
from distmp.utils.tensor_trees import parameter_name

# Gradients by name of parameter.
ByName = Mapping[str, Tensor | None]
# Classes whose only child is the wrapped module. By name, because most of them belong to libraries
# that are not imported.
_WRAPPERS = {"DistributedDataParallel", "DeepSpeedEngine", "OptimizedModule", "_FabricModule"}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of DDP, DeepSpeed, Fabric and `torch.compile`."""
    while type(model).__name__ in _WRAPPERS:
        model = next(model.children())
    return model


def zero_optimizer(model: nn.Module) -> Any:
    """Return the optimizer of a DeepSpeed engine that shards or casts; None for other models."""
    optimizer = getattr(model, "optimizer", None)
    is_engine = type(model).__name__ == "DeepSpeedEngine"
    return None if not is_engine or isinstance(optimizer, torch.optim.Optimizer) else optimizer


def innermost(model: nn.Module, optimizer: Any) -> Any:
    """Return the optimizer of an engine, or that inside of one of accelerate or Lightning."""
    while isinstance(wrapped := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = wrapped
    return zero_optimizer(model) or optimizer


def unseen(model: nn.Module, optimizer: Any) -> str | None:
    """Return why an audit cannot see the gradients of a model; None if it can."""
    if any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules()):
        return "is compiled; audit it without torch.compile"
    if is_fsdp1(model):
        return "shards of FSDP1 cannot be read here; use check_gradient"
    held = held_parameters(model, optimizer)
    # Those of frozen parameters only refuse gradients.
    others = [p for p in model.parameters() if p not in held and p.requires_grad]
    hooked = [p for p in others if p._post_accumulate_grad_hooks]
    if hooked and held.isdisjoint(model.parameters()):
        return "the optimizer has other tensors; audit an engine with the policy fp32 or autocast"
    if hooked or any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        return "optimizers run inside of backward; audit the model with one optimizer"
    return None


def held_parameters(model: nn.Module, *optimizers: Any) -> set[nn.Parameter]:
    """Return the parameters that optimizers update."""
    zero = zero_optimizer(model)
    groups = [group["params"] for each in optimizers for group in each.param_groups]
    for name in ("bit16_groups", "fp16_groups", "bf16_groups"):  # its own groups are flat
        groups = getattr(zero, name, None) or groups
    return {parameter for group in groups for parameter in group}


def remove_gradients(model: nn.Module) -> None:
    """Remove all gradients, also those that DeepSpeed keeps elsewhere."""
    if (zero := zero_optimizer(model)) is not None:
        zero.zero_grad()
    model.zero_grad()


def is_fsdp1(model: nn.Module) -> bool:
    """Return whether FSDP1 shards a part of the model."""
    return any(isinstance(part, FullyShardedDataParallel) for part in model.modules())


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in the plain model; a tied one once."""
    return {parameter_name(name): p for name, p in unwrapped(model).named_parameters()}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return those that require a gradient."""
    return {name: p for name, p in named_parameters(model).items() if p.requires_grad}


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the full parameters and buffers; every rank has to call it."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        buffers = {parameter_name(n): b for n, b in unwrapped(model).named_buffers()}
        held = {**named_parameters(model), **buffers}
        return {name: full(tensor).clone() for name, tensor in held.items()}


def full_gradients(model: nn.Module, gradients: ByName | None = None) -> ByName:
    """Return the full gradients of trained parameters; every rank has to call it.

    Args:
        model: The model.
        gradients: By name, in place of the current ones.

    Returns:
        Gradients by name; None for a parameter without a gradient on this rank.
    """
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        trained = trained_parameters(model)
        found = {n: _held(model, p) for n, p in trained.items()} if gradients is None else gradients
        return {name: _full_gradient(p, found.get(name)) for name, p in trained.items()}


def _held(model: Any, parameter: nn.Parameter) -> Tensor | None:
    if zero_optimizer(model) is None:
        return parameter.grad
    from deepspeed.utils import safe_get_full_grad

    found = safe_get_full_grad(parameter)
    return found if found is None else found.to(model.get_data_types()[1])  # that sums have


def _full_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor | None:
    if gradient is None and is_dtensor(parameter):
        full(torch.zeros_like(parameter))  # takes part in the all-gather of other ranks
    return None if gradient is None else full(gradient).to_dense()


@torch.no_grad()
def full(tensor: Tensor) -> Tensor:
    """Return a full tensor; every rank has to call it."""
    if hasattr(tensor, "ds_id"):  # ZeRO-3
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([tensor]):
            return tensor.clone()
    return (tensor.full_tensor() if is_dtensor(tensor) else tensor).detach()


@contextlib.contextmanager
def plain_model(
    model: nn.Module, tensors: dict[str, Tensor], training: Mapping[str, bool], *, casts: bool
) -> Iterator[None]:
    """Let a module compute with other tensors, without hooks of FSDP2 and ZeRO-3.

    Args:
        model: The module, without wrappers.
        tensors: Full parameters and buffers by their names in it.
        training: Whether parts are in training mode, by their names in the plain model.
        casts: Whether hooks of a policy of distmp cast inputs and outputs.
    """
    kept = [(vars(part), {**vars(part)}) for part in model.modules()]
    try:
        for name, part in model.named_modules():
            mode = training.get(parameter_name(name), part.training)
            vars(part).update(training=mode, _compiled_call_impl=None)
            if not casts:
                vars(part).pop(FP32_INPUTS, None)
            for key in () if casts else ("_forward_pre_hooks", "_forward_hooks"):
                items = vars(part)[key].items()
                vars(part)[key] = OrderedDict(i for i in items if not isinstance(i[1], CastHook))
            if isinstance(part, FSDPModule) or hasattr(part, "ds_id"):
                hooks = [key for key in vars(part) if key.endswith("_hooks")]
                vars(part).update({key: OrderedDict() for key in hooks})
                vars(part).update(_parameters={**part._parameters})
        with _reparametrize_module(model, tensors, tie_weights=True):
            yield
    finally:
        for attributes, before in kept:
            attributes.clear()
            attributes.update(before)
