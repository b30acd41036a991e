"""The only file of distmp that uses private attributes of FSDP.

torch 2.13 has no public API to accumulate gradients in FP32 until the last microbatch, to discard
the gradients of an abandoned step, and to find out which parameters had a gradient and what
gradients are divided by. tests/parallel/test_fsdp_internals.py fails if torch changes these
attributes, or if another file uses them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from distmp.buckets.used_parameters import weights_used_once
from distmp.errors import SetupError, require
from distmp.utils.dtypes import is_dtensor

# Versions of torch on which the tests have passed; see the README.
TESTED = ("2.10", "2.11", "2.13", "2.14", "2.15")
GROUP_ATTRIBUTES = ("fsdp_params", "_partial_reduce_output")
PARAMETER_ATTRIBUTES = (
    "init_unsharded_param",
    "unsharded_accumulated_grad",
    "sharded_param",
    "_module_info",
)
# Methods that move a gradient to `unsharded_accumulated_grad`, in the reduce dtype.
UPCASTS = ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed")
# Method of torch 2.15 that lets autograd sum several uses of a weight in 16 bits, to save a cast.
_SET_GRAD_DTYPES = "_set_unsharded_grad_dtypes"
# Function by which FSDP2 divides a parameter into one part for each rank.
CHUNKS = "torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty"

_Watch = Callable[[nn.Parameter], None]


class GradientReduction(NamedTuple):
    """How a wrapper reduces the gradients of its parameters over ranks.

    Attributes:
        groups: The gradients are summed over these groups, one after the other.
        accumulates: Whether the next backward only accumulates gradients, as under `no_sync`.
        divisor: The number that the sum is divided by, unless that is unknown.
        unknown: Name of the hook or method that makes the divisor unknown; None if it is known.
    """

    groups: tuple[dist.ProcessGroup, ...]
    accumulates: bool
    divisor: float
    unknown: str | None


def check(model: nn.Module) -> None:
    """Refuse a version of torch whose FSDP2 lacks an attribute that this file uses.

    Args:
        model: A sharded model.

    Raises:
        SetupError: Naming the missing attributes.
    """
    missing = {name for group in _groups(model) for name in _missing(group, GROUP_ATTRIBUTES)}
    if not missing:
        parameters = _parameters(model)
        missing = {name for each in parameters for name in _missing(each, PARAMETER_ATTRIBUTES)}
    _refuse_if(missing, "accumulate in FP32", " or strategy = 'ddp'")


def _refuse_if(missing: set[str], purpose: str, otherwise: str = "") -> None:
    if missing:
        problem = (
            f"FSDP2 of torch {torch.__version__} has no {', '.join(sorted(missing))}, which distmp "
            f"needs to {purpose}; use a version of torch that distmp is tested with "
            f"({', '.join(TESTED)}){otherwise and ',' + otherwise}"
        )
        raise SetupError({0: problem}, exit_code=2)


def accumulate_in_fp32(model: nn.Module) -> None:
    """Make the gradients of gathered parameters FP32, independent of the parameter's dtype.

    Autograd then sums in FP32, over several uses of a weight in one backward and over microbatches.
    All gradients of a group have one dtype, in every microbatch; FSDP2 fails if they differ
    (pytorch#196996).
    """
    for parameter in _parameters(model):
        parameter.init_unsharded_param = functools.partial(_init_in_fp32, parameter)
    for group in _groups(model):
        if hasattr(group, _SET_GRAD_DTYPES):
            setattr(group, _SET_GRAD_DTYPES, _keep_grad_dtypes)


def _init_in_fp32(parameter: Any) -> None:
    """Let FSDP2 prepare a gathered parameter, and make its gradients FP32 at the first gather."""
    is_new = not _was_gathered(parameter)
    type(parameter).init_unsharded_param(parameter)
    gathered = parameter._unsharded_param
    if is_new and gathered.is_floating_point():  # frozen parameters too: they may be unfrozen later
        gathered.grad_dtype = torch.float32


def sixteen_bit_groups(model: nn.Module) -> list[Any]:
    """Return the parameter groups of a sharded model that are gathered in 16 bits."""
    return [
        group
        for group in _groups(model)
        if any(
            (group.mp_policy.param_dtype or each.sharded_param.dtype).itemsize == 2
            for each in group.fsdp_params
        )
    ]


@contextlib.contextmanager
def unconverted_gradients(sixteen_bit: list[Any], loss: torch.Tensor) -> Iterator[None]:
    """In the context, let FSDP2 convert 16-bit gradients to FP32 when it copies or adds them.

    This takes 6 instead of 14 bytes of memory traffic per element of a reduction, and gives the
    same bits. A group with a weight that the loss uses several times, or not at all, is excluded:
    the sum over uses needs FP32, and all gradients of a group one dtype.

    Args:
        sixteen_bit: The groups of a model after `accumulate_in_fp32`.
        loss: The tensor whose `backward` is called in the context.
    """
    groups = [gathered for group in sixteen_bit if (gathered := _convertible(group))]
    used_once = weights_used_once(loss) if groups else set()
    unconverted = [
        parameter
        for gathered in groups
        if used_once.issuperset(map(id, gathered))
        for parameter in gathered
    ]
    for parameter in unconverted:
        parameter.grad_dtype = None
    try:
        yield
    finally:
        for parameter in unconverted:
            if parameter.grad is not None and parameter.grad.dtype != torch.float32:
                parameter.grad = None  # backward has failed
            parameter.grad_dtype = torch.float32


def _convertible(group: Any) -> list[nn.Parameter]:
    """Return the trainable 16-bit parameters of a group; none if 16-bit gradients would be kept."""
    trainable = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
    gathered = [each._unsharded_param for each in trainable if _was_gathered(each)]
    if any(parameter.dtype.itemsize != 2 for parameter in gathered):
        return []
    added = {parameter.grad is not None for parameter in gathered}
    return gathered if added == {True} or (added == {False} and group.reduce_grads) else []


def refuse_replaced_parameters(model: nn.Module) -> None:
    """Refuse tensors in place of parameters, which the next gather of FSDP2 would replace.

    Args:
        model: A sharded model that is about to run.

    Raises:
        ConfigError: Naming a replaced parameter.
    """
    problem = (
        "is replaced by another tensor in forward (torch.func.functional_call), but FSDP computes "
        "with the parameter; use the strategy 'ddp'"
    )
    for parameter in _parameters(model):
        info = parameter._module_info
        kept = isinstance(getattr(info.module, info.param_name), nn.Parameter)
        require(kept, "model", info.param_name, problem)


def watch_reductions(model: nn.Module, used: _Watch, before: _Watch, reduced: _Watch) -> None:
    """Make FSDP2 reduce zeros for parameters without a gradient on this rank, and watch it.

    By default FSDP2 reduces only the gradients that a rank has. If ranks differ, the reduction
    fails or adds the gradients of different parameters. `set_reduce_scatter_unused_params` of torch
    2.13 creates zeros in the dtype of the gathered parameter, which cannot be reduced together with
    FP32 gradients.

    Args:
        model: A sharded model.
        used: Called after each backward with each sharded parameter that has had a gradient on this
            rank since the last reduction.
        before: Called with each sharded parameter before its gradient is reduced.
        reduced: Called with each sharded parameter after FSDP2 has reduced its gradient.
    """
    for group in _groups(model):
        group.post_backward = functools.partial(_post_backward, group, used, before, reduced)


def _post_backward(group: Any, used: _Watch, before: _Watch, reduced: _Watch, *unused: Any) -> None:
    """Set zeros for parameters without a gradient, then run the post-backward of FSDP2."""
    if not any(map(_was_gathered, group.fsdp_params)):
        return  # no rank has used it, and FSDP2 of torch 2.13 would fail without synchronization
    added: list[nn.Parameter] = []
    trained: list[nn.Parameter] = []
    for parameter in group.fsdp_params:
        # Not of the gathered one: if its module has not run since an unfreeze, it is out of date.
        if not (_was_gathered(parameter) and parameter.sharded_param.requires_grad):
            continue
        gathered = parameter._unsharded_param
        trained.append(gathered)
        if _gradients(parameter):
            used(parameter.sharded_param)
        elif group.reduce_grads:
            gathered.grad = torch.zeros_like(gathered, dtype=gathered.grad_dtype)
        if group.reduce_grads and group.all_reduce_grads:
            added.append(parameter.sharded_param)
    _unify_dtypes(trained)
    for shard in added:
        before(shard)
    type(group).post_backward(group, *unused)
    for shard in added:
        reduced(shard)


def _unify_dtypes(gathered: list[nn.Parameter]) -> None:
    """Convert gradients to FP32 if they have several dtypes, which FSDP2 refuses.

    A kernel may compute the gradient of a 16-bit weight in FP32.
    """
    gradients = [parameter.grad for parameter in gathered if parameter.grad is not None]
    if len({gradient.dtype for gradient in gradients}) > 1:
        for parameter in gathered:
            parameter.grad = None if parameter.grad is None else parameter.grad.float()


def reduce_partial_in_reduce_dtype(model: nn.Module) -> bool:
    """Make FSDP2 sum gradients over tensor-parallel ranks in the policy's `reduce_dtype`.

    Args:
        model: A sharded model.

    Returns:
        Whether any part of the model has a policy with a `reduce_dtype`.

    Raises:
        SetupError: If this version of torch is not supported.
    """
    groups = [group for group in _groups(model) if group.mp_policy.reduce_dtype is not None]
    missing = {
        name for group in groups for part in group.fsdp_params for name in _missing(part, UPCASTS)
    }
    _refuse_if(missing, "reduce over tensor-parallel ranks in the reduce dtype")
    for group in groups:
        group.post_backward = functools.partial(_upcast_partial, group, group.post_backward)
    return bool(groups)


def _upcast_partial(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    """Convert gradients before FSDP2 reduces partial sums of tensor-parallel ranks.

    It converts all gradients of the group, which have to have one dtype (pytorch#196996).
    """
    gathered = filter(_was_gathered, group.fsdp_params)
    if any(_is_partial(part._unsharded_param.grad) for part in gathered):
        for part in group.fsdp_params:
            for name in UPCASTS:
                getattr(part, name)()
    post_backward(*unused)


def _is_partial(gradient: Any) -> bool:
    return is_dtensor(gradient) and any(p.is_partial() for p in gradient.placements)


def discard_gradients(model: nn.Module) -> None:
    """Discard gradients that are not reduced yet, which `zero_grad` does not clear."""
    for group in _groups(model):
        group._partial_reduce_output = None
    for parameter in _parameters(model):
        if _was_gathered(parameter):
            parameter._unsharded_param.grad = None
        if "unsharded_accumulated_grad" in vars(parameter):
            parameter.unsharded_accumulated_grad = None


def unreduced_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of this rank that are not fully reduced yet."""
    sums = [group._partial_reduce_output for group in _groups(model)]
    gathered = filter(_was_gathered, _parameters(model))
    gradients = (gradient for parameter in gathered for gradient in _gradients(parameter))
    return [*(each for each in sums if each is not None), *gradients]


def fsdp2_reductions(model: nn.Module) -> Iterator[GradientReduction]:
    """Yield how `fully_shard` and `replicate` reduce each group of trainable parameters.

    Args:
        model: A module with sharded or replicated parts, or none.
    """
    for group in _groups(model):
        if not any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params):
            continue
        names = ("shard_process_group", "replicate_process_group")
        groups = tuple(filter(None, (getattr(group.mesh_info, name, None) for name in names)))
        accumulates = not (group.reduce_grads and group.all_reduce_grads)
        unknown = name_of(group._all_reduce_hook)
        if unknown is None and group.gradient_divide_factor is not None:
            # torch 2.13 may divide by it twice, for a shard dimension of one rank.
            unknown = "set_gradient_divide_factor()"
        divisor = math.prod(each.size() for each in groups)
        yield GradientReduction(groups, accumulates, divisor, unknown)


def fsdp2_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that FSDP2 shards or replicates, also as they are in forward."""
    for parameter in _parameters(model):
        yield parameter.sharded_param
        if _was_gathered(parameter):
            yield parameter._unsharded_param


def fsdp1_parameters(unit: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of an FSDP1 unit without those that it was told to ignore."""
    state: Any = unit
    return {*unit.parameters()} - {*state._ignored_params}


def fsdp1_reductions(unit: nn.Module) -> Iterator[GradientReduction]:
    """Yield how an FSDP1 unit reduces the gradients of its own parameters, if it trains any.

    Args:
        unit: A `FullyShardedDataParallel`, whose nested units reduce their own gradients.
    """
    state: Any = unit
    if state._handle is not None and state._handle.flat_param.requires_grad:
        groups = tuple(filter(None, (state.process_group, getattr(state, "_inter_node_pg", None))))
        divisor = state._gradient_predivide_factor * state._gradient_postdivide_factor
        hook = name_of(state._comm_hook)
        yield GradientReduction(groups, not state._sync_gradients, divisor, hook)


def name_of(hook: object) -> str | None:
    """Return the name of a function or of the class of a callable object; None for None."""
    return None if hook is None else getattr(hook, "__qualname__", type(hook).__name__)


def fsdp2_policies(model: nn.Module) -> list[MixedPrecisionPolicy]:
    """Return the policy of each parameter group that `fully_shard` has created."""
    return [group.mp_policy for group in _groups(model)]


def _parameters(model: nn.Module) -> Iterator[Any]:
    return (parameter for group in _groups(model) for parameter in group.fsdp_params)


def written_parameter(model: nn.Module) -> str | None:
    """Return the name of a gathered parameter that was written to; None if there is none.

    FSDP2 gathers without incrementing the version, so a changed version is a write of the model.
    """
    for parameter in _parameters(model):
        gathered = getattr(parameter, "_unsharded_param", None)
        if type(gathered) is nn.Parameter and gathered._version:
            return str(parameter._param_fqn)
    return None


def _groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's parameter groups, each of which is gathered and reduced as one unit."""
    seen: set[int] = set()
    for part in model.modules():
        for group in _groups_of(part):
            if id(group) not in seen:
                seen.add(id(group))
                yield group


def _groups_of(part: nn.Module) -> list[Any]:
    if not isinstance(part, FSDPModule):
        return []
    state: Any = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 a module has at most one group
        return [state._fsdp_param_group] if state._fsdp_param_group else []
    return [*groups]


def _was_gathered(parameter: Any) -> bool:
    return hasattr(parameter, "_unsharded_param")


def _gradients(parameter: Any) -> list[torch.Tensor]:
    """Return the gradients of a gathered parameter: `.grad`, and its sum before torch 2.15."""
    found = (parameter._unsharded_param.grad, vars(parameter).get("unsharded_accumulated_grad"))
    return [gradient for gradient in found if gradient is not None]


def _keep_grad_dtypes(defer_upcast: bool) -> None:
    """Replace FSDP2's method, so that gradients keep the dtype set by `accumulate_in_fp32`."""


def _missing(holder: Any, names: tuple[str, ...]) -> list[str]:
    return [f"{type(holder).__name__}.{name}" for name in names if not hasattr(holder, name)]
