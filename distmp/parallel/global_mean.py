"""The loss whose gradient is that of the mean over all ranks and microbatches of a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from distmp.distributed.comparison import Fingerprint
from distmp.errors import ConfigError, listed, require
from distmp.parallel import fsdp_internals
from distmp.parallel.fsdp_internals import GradientReduction
from distmp.scaling.step_decision import pack
from distmp.utils.dtypes import is_dtensor
from distmp.utils.host_copy import to_device
from distmp.utils.tensor_trees import version_counters

Group = dist.ProcessGroup | DeviceMesh


def reduced_over(
    module: nn.Module,
    found: Sequence[GradientReduction],
    group: Group | None,
    divisor: float | None,
) -> tuple[tuple[dist.ProcessGroup, ...], float]:
    """Return the groups over which the gradients of a module are summed, and the sum's divisor.

    Args:
        module: The module.
        found: How its wrappers reduce gradients.
        group: Overrides the ranks that are found.
        divisor: Overrides the divisor that is found.

    Returns:
        Process groups of more than one rank, to sum over one after the other; and the divisor.

    Raises:
        ConfigError: If the ranks or the divisor are neither given nor found, or if parts of the
            module differ.
    """
    if not found and (group is None or divisor is None):
        _check_single(module, group, divisor)
    if found and group is None:
        _check_all_reduced(module)
    groups = _found_groups(found) if group is None else _dimensions(group)
    several = tuple(each for each in groups if each.size() > 1)
    return several, _found_divisor(found) if divisor is None else divisor


def gradient_reductions(module: nn.Module) -> Iterator[GradientReduction]:
    """Yield how the wrappers in a module reduce the gradients of its parameters.

    Args:
        module: A module that is wrapped in DDP or FSDP1, to which `fully_shard` or the `replicate`
            of `replicate_with_fsdp` was applied, or that contains such modules.

    Raises:
        ConfigError: For DDP inside of `join()`.
    """
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            yield _ddp_reduction(part)
        elif isinstance(part, FullyShardedDataParallel):
            yield from fsdp_internals.fsdp1_reductions(part)
    yield from fsdp_internals.fsdp2_reductions(module)


def _ddp_reduction(ddp: Any) -> GradientReduction:
    problem = (
        "the global mean needs a loss of every rank in every step, but join() lets ranks stop "
        "early; give ranks without data a microbatch of weight 0 instead"
    )
    require(not ddp._join_config.enable, "module", type(ddp).__name__, problem)
    group, accumulates = ddp.process_group, not ddp.require_backward_grad_sync
    hook = fsdp_internals.name_of(ddp._comm_hooks[0][0]) if ddp._comm_hooks else None
    return GradientReduction((group,), accumulates, group.size(), hook)


def _check_single(module: nn.Module, group: Group | None, divisor: float | None) -> None:
    """Refuse a module without a wrapper if there are several ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # DTensors may describe how all ranks share the parameters.
    spans_all_ranks = any(
        is_dtensor(parameter) and parameter.device_mesh.size() == dist.get_world_size()
        for parameter in module.parameters()
    )
    problem = (
        "is not wrapped in DDP or FSDP, so it is unknown how its gradients are reduced; pass the "
        "wrapped module (in Lightning, trainer.strategy.model), or pass both the ranks over which "
        "you sum gradients and what you divide the sum by: group=..., divisor=..."
    )
    known = group is None and divisor is None and spans_all_ranks
    require(known, "module", type(module).__name__, problem)


# The parts and the frozen parameters of modules whose other parameters are reduced: to find their
# names takes long. The `id` of each part, because a reference would keep the module alive.
_checked: WeakKeyDictionary[nn.Module, tuple[list[int], list[nn.Parameter]]] = WeakKeyDictionary()


def _check_all_reduced(module: nn.Module) -> None:
    """Refuse trainable parameters beside the wrapped parts of a module."""
    parts = [id(each) for part in module.modules() for each in (part, *part._parameters.values())]
    known, frozen = _checked.get(module, (None, []))
    if parts == known and not any(each.requires_grad for each in frozen):
        return
    wrapped = {id(parameter) for parameter in fsdp_internals.fsdp2_parameters(module)}
    for part in module.modules():
        # Without the parameters that the wrapper was told to ignore.
        if isinstance(part, DistributedDataParallel):
            wrapped.update(map(id, part._delay_all_reduce_params))
            trainable = sum(parameter.requires_grad for parameter in part._module_parameters)
            # It does not reduce those that were frozen when it was built. Without a logger, it
            # delays the reduction of all.
            built = part._get_ddp_logging_data()["num_parameter_tensors"] if part.logger else 0
            if trainable <= built:
                wrapped.update(map(id, part._module_parameters))
        elif isinstance(part, FullyShardedDataParallel):
            wrapped.update(map(id, fsdp_internals.fsdp1_parameters(part)))
    problem = (
        "no wrapper reduces its gradient, or DDP was built while some parameters were frozen, so "
        "ranks would update it differently; wrap the whole module after you unfreeze parameters, "
        "or reduce it yourself and pass group=... and divisor=..."
    )
    for name, parameter in module.named_parameters():
        reduced = id(parameter) in wrapped or is_dtensor(parameter) or not parameter.requires_grad
        require(reduced, "module", name, problem)
    frozen = [each for each in module.parameters() if not each.requires_grad]
    _checked[module] = parts, frozen


def _found_divisor(found: Sequence[GradientReduction]) -> float:
    unknown = {reduction.unknown for reduction in found if reduction.unknown is not None}
    if unknown:
        problem = "reduces gradients in its own way; pass the number by which it divides the sum"
        raise ConfigError("divisor", None, f"{', '.join(sorted(unknown))} {problem} over ranks")
    divisors = {reduction.divisor for reduction in found}
    if len(divisors) > 1:
        numbers = listed([f"{number:g}" for number in sorted(divisors)])
        problem = (
            f"parts of the module divide gradients by different numbers, {numbers}; call "
            "set_gradient_divide_factor() with the same number on each of them, and pass it"
        )
        raise ConfigError("divisor", None, problem)
    return divisors.pop() if divisors else 1.0


def _found_groups(found: Sequence[GradientReduction]) -> Sequence[dist.ProcessGroup]:
    by_ranks = {_ranks(reduction): reduction.groups for reduction in found}
    problem = (
        "parts of the module reduce gradients over different ranks; pass the process group or "
        "mesh of all ranks that see different samples"
    )
    require(len(by_ranks) <= 1, "group", None, problem)
    return by_ranks.popitem()[1] if by_ranks else ()


def _dimensions(group: Group) -> Sequence[dist.ProcessGroup]:
    if not isinstance(group, DeviceMesh):
        return (group,)
    if group.get_coordinate() is None:
        raise ConfigError("group", group, f"does not contain this rank, {dist.get_rank()}")
    return group.get_all_groups()


def _ranks(reduction: GradientReduction) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(dist.get_process_group_ranks(group)) for group in reduction.groups)


# torch's enum values of `reduction`, which the autograd nodes of losses store.
NONE, MEAN, SUM = range(3)

NO_SAMPLES = "a loss sum such as model(inputs).sum() * 0"


def global_mean(
    loss_sum: Tensor,
    weight: Tensor | float,
    module: nn.Module,
    *,
    microbatches: int = 1,
    group: Group | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Return the loss whose gradient is that of the global mean under any wrapper.

    DDP and FSDP average gradients over ranks. If ranks or microbatches have different numbers of
    tokens, the mean of their mean losses is not the mean over tokens. Call `backward` on the
    returned loss instead: after the last microbatch, the gradients of the module are those of
    `sum(loss_sum) / sum(weight)`, the sums taken over all microbatches and all ranks that see
    different samples. That includes the ranks of a context-parallel dimension that the wrapper
    reduces over, and counts tensor-parallel ranks once.

    Every rank calls it equally often in a step: a rank with fewer microbatches passes additional
    ones with the loss sum `model(inputs).sum() * 0`, one without tokens weight 0. A call takes one
    all-reduce of four numbers per dimension of the data-parallel mesh; the host does not wait for
    the device. Do not divide the loss again, neither by the number of ranks nor by that of
    microbatches. A loss scale may multiply it.

    Args:
        loss_sum: Sum of the losses of the samples or tokens of this microbatch on this rank,
            computed from the output of the module; one element, FP32 or FP64, because 16 bits
            would round the sum and the factor of all gradients. A DTensor counts with the value of
            all its shards.
        weight: Number of samples or tokens of this rank in the step, summed over its microbatches;
            0 or more. A number, or a tensor with one element on any device, not of 16 bits.
        module: The module whose gradients are computed: wrapped in DDP or FSDP1, with
            `fully_shard` or the `replicate` of `replicate_with_fsdp` applied, containing such
            modules, or on a single rank.
        microbatches: Number of microbatches of the step on each rank, which `weight` has to cover.
        group: The ranks that see different samples, a process group or a mesh, if they are not
            the ranks over which the module reduces gradients.
        divisor: Divisor of the sum of gradients over ranks, if the module does not determine it.

    A loss that autograd has computed as a mean, such as that of `cross_entropy` or of a model of
    transformers, causes a warning: its gradient would be divided by the weight twice. So does a
    weight on the host that is another one than in the first microbatch of the step.

    Returns:
        The loss for `backward`, 0-dim, in the dtype of `loss_sum`. Its value is the same on all
        ranks: the microbatch's part of the global mean, so the values of a step's microbatches add
        up to the global mean. If the weight of all ranks is 0, the loss and all gradients are 0. If
        the weight of a rank is negative or not finite, the loss and all gradients are NaN.

    Raises:
        ConfigError: For an argument of the wrong kind, a negative or non-finite number as weight, a
            loss sum on several ranks that has no graph, a module that accumulates although
            `microbatches` is 1, numbers of microbatches that differ between ranks (on CPUs), a
            module of which it is unknown how its gradients are reduced, and parts of a module that
            are reduced differently.

    Example:
        >>> import torch, distmp
        >>> model = torch.nn.Linear(4, 1)
        >>> microbatches = [torch.ones(3, 4), torch.ones(5, 4)]
        >>> weight = sum(len(batch) for batch in microbatches)
        >>> for batch in microbatches:
        ...     loss = distmp.global_mean(model(batch).sum(), weight, model, microbatches=2)
        ...     loss.backward()
        >>> model.bias.grad
        tensor([1.])
    """
    _check_tensors(loss_sum, weight)
    _check_reduction(module, microbatches, group, divisor)
    warn_about_mean("global_mean", loss_sum, weight, microbatches)
    _warn_about_parts(module, weight, microbatches)
    found = [*gradient_reductions(module)]
    accumulates = any(reduction.accumulates for reduction in found)
    problem = (
        "the module accumulates gradients without reducing them, so the step has several "
        "microbatches; pass their number, and as weight that of all of them together"
    )
    require(microbatches > 1 or not accumulates, "microbatches", microbatches, problem)
    groups, divided_by = reduced_over(module, found, group, divisor)
    problem = (
        "is not computed from the output of the model, so its backward would not join the "
        f"reduction of gradients; pass {NO_SAMPLES} for a microbatch without samples, and "
        "compute a metric under torch.no_grad()"
    )
    if loss_sum.grad_fn is None and groups and torch.is_grad_enabled() and module.training:
        trains = any(parameter.requires_grad for parameter in module.parameters())
        require(not trains, "loss_sum", "Tensor", problem)
    loss_sum = loss_sum.full_tensor() if is_dtensor(loss_sum) else loss_sum
    counts = Fingerprint(microbatches, math.prod(each.size() for each in groups))
    numbers = (valid_weight(weight, loss_sum.device), loss_sum.detach().sum())
    sums = pack(*numbers, *counts.terms, device=loss_sum.device)
    for each in groups:
        dist.all_reduce(sums, group=each)
    # Otherwise, this all-reduce would soon meet one of gradients. On a GPU, the host would wait.
    if sums.device.type == "cpu" and counts.differs(sums[2:]):
        problem = f"differs between ranks; ranks with fewer need additional ones with {NO_SAMPLES}"
        raise ConfigError("microbatches", microbatches, problem)
    inverse = torch.where(sums[0] == 0, 0.0, 1.0 / sums[0])
    value = torch.where(sums[0] == 0, 0.0, sums[1] * inverse)
    return MeanLoss.apply(loss_sum, value, inverse * divided_by)


class MeanLoss(torch.autograd.Function):
    """Has the value of a mean, and `factor` times the gradient of this rank's sum."""

    @staticmethod
    def forward(ctx: Any, loss_sum: Tensor, value: Tensor, factor: Tensor) -> Tensor:
        """Return the value in the dtype of the loss sum."""
        ctx.dtype, ctx.shape = loss_sum.dtype, loss_sum.shape
        ctx.save_for_backward(factor)
        return value.to(loss_sum.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the loss sum."""
        (factor,) = ctx.saved_tensors
        return (gradient * factor).to(ctx.dtype).reshape(ctx.shape), None, None


def valid_weight(weight: Tensor | float, device: torch.device) -> Tensor:
    """Return a weight, 0-dim FP64; NaN for an invalid one, so that its sum over ranks is NaN."""
    if isinstance(weight, Tensor):
        weight = weight.full_tensor() if is_dtensor(weight) else weight
        total = to_device(weight, device).sum().to(torch.float64)
    else:
        total = torch.full((), float(weight), dtype=torch.float64, device=device)
    return torch.where((total >= 0) & (total < math.inf), total, math.nan)


def _check_tensors(loss_sum: object, weight: object) -> None:
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
        shown = tuple(loss_sum.shape) if isinstance(loss_sum, Tensor) else loss_sum
        raise ConfigError("loss_sum", shown, "must be a tensor with one element; sum the losses")
    dtype = min(_summed_in(loss_sum), loss_sum.dtype, key=lambda each: each.itemsize)
    problem = "rounds the sum and the gradients; sum in FP32, such as of logits.float()"
    require(dtype.itemsize >= 4, "loss_sum", dtype, problem)
    check_weight(weight)
    if _is_number(weight):
        require(0 <= weight < math.inf, "weight", weight, "must be finite, and 0 or more")


COARSE = "rounds large numbers; sum integers or FP32, such as mask.sum(dtype=torch.float32)"


def is_coarse(weight: Tensor) -> bool:
    """Return whether a weight is a floating-point number in 16 bits, see `COARSE`."""
    return weight.is_floating_point() and weight.itemsize < 4


def check_weight(weight: object) -> None:
    """Refuse a weight that is not one real number; its value is not read.

    Raises:
        ConfigError: If it is not a number, or a tensor with one element that needs no gradient;
            and for a floating-point tensor in 16 bits, which rounds a count above 256 or 2048.
    """
    if isinstance(weight, Tensor):
        is_plain = weight.numel() == 1 and not (weight.requires_grad or weight.is_complex())
        problem = "must have one real element and require no gradient; sum it and detach it"
        require(is_plain, "weight", tuple(weight.shape), problem)
        require(not is_coarse(weight), "weight", weight.dtype, COARSE)
    elif not _is_number(weight):
        raise ConfigError("weight", weight, "must be a number or a tensor with one element")


def _summed_in(loss: Tensor) -> torch.dtype:
    """Return the dtype of the loss, or the dtype before its last cast."""
    node: Any = loss.grad_fn
    if node is not None and node.name().startswith("ToCopyBackward"):
        (node, index), *_ = node.next_functions
        return node._input_metadata[index].dtype
    return loss.dtype


def warn_about_mean(
    function: str, loss: Tensor, weight: Tensor | float, microbatches: int = 1
) -> None:
    """Warn about a mean in place of a loss sum. Call it directly in a public function.

    Args:
        function: Name of the public function.
        loss: The loss, in whose autograd graph a mean is visible.
        weight: The weight of the microbatches.
        microbatches: Number of microbatches. The mean of one sample is its sum.
    """
    if _is_on_device(weight):
        return
    if float(weight) > microbatches and is_mean(loss, float(weight), microbatches):
        warnings.warn(
            f"{function} divides the loss by its weight, but the loss is a mean already; pass the "
            f"sum (reduction='sum', or loss * number of samples) with the weight {float(weight):g}",
            RuntimeWarning,
            stacklevel=3,
        )


class _FirstMicrobatch(NamedTuple):
    """The first microbatch of the latest step of a module.

    Attributes:
        parameters: The parameters of the module. A walk through its parts takes long.
        writes: How often they were written to.
        weights: The weights of its losses.
    """

    parameters: WeakSet[nn.Parameter]
    writes: int
    weights: set[float]


_first_microbatches: WeakKeyDictionary[nn.Module, _FirstMicrobatch] = WeakKeyDictionary()


def _warn_about_parts(module: nn.Module, weight: Tensor | float, microbatches: int) -> None:
    """Warn about weights that differ between the microbatches of a step.

    Losses may have a weight each, but all of them occur before a parameter has a gradient.
    """
    if microbatches == 1 or not torch.is_grad_enabled() or _is_on_device(weight):
        return
    first, weight = _first_microbatches.get(module), float(weight)
    if first is None or first.writes != sum(version_counters(first.parameters)):
        # The first step, or the optimizer has stepped.
        parameters = WeakSet(module.parameters())
        writes = sum(version_counters(parameters))
        _first_microbatches[module] = _FirstMicrobatch(parameters, writes, {weight})
    elif weight not in first.weights:
        first.weights.add(weight)
        if any(parameter.grad is not None for parameter in first.parameters):
            problem = (
                "differs from the first microbatch of this step; pass that of all microbatches"
            )
            warnings.warn(f"weight = {weight:g}: {problem}", RuntimeWarning, stacklevel=3)


def _is_on_device(weight: Tensor | float) -> bool:
    """Return whether the host would wait for a weight."""
    return isinstance(weight, Tensor) and (weight.device.type != "cpu" or is_dtensor(weight))


def is_mean(
    loss: Tensor, weight: float, microbatches: int = 1, *, host_waits: bool = False
) -> bool:
    """Return whether the autograd graph shows a mean that is not multiplied by its weight.

    Functions that torch does not divide into operations, such as compiled ones, hide it.

    Args:
        loss: The loss.
        weight: The weight of the microbatches, above 1.
        microbatches: Number of microbatches.
        host_waits: Whether the host may wait to read the factors of the loss from a device.
    """
    nodes: list[tuple[Any, float]] = [] if loss.grad_fn is None else [(loss.grad_fn, 1.0)]
    visited, found = {loss.grad_fn}, False
    # A larger factor may be the weight. The weight of one of several microbatches is unknown.
    limit = max(1.5, weight / 2 if microbatches == 1 else 0)
    for node, factor in nodes:  # the loop appends to it
        own = _factor(node, host_waits=host_waits)
        if own == 1 and microbatches > 1 and node.name().startswith("Mul"):
            return False  # a microbatch of one sample
        is_reduction = node.name().startswith("Mean")
        is_reduction |= getattr(node, "_saved_reduction", None) == MEAN
        if is_reduction or math.isclose(own * weight, 1, rel_tol=0.01):
            if not factor < limit:  # or NaN
                return False
            found = True
            continue
        for following, index in node.next_functions:
            if following is None or following in visited:
                continue
            if math.prod(following._input_metadata[index].shape) != 1:
                return False  # another reduction
            visited.add(following)
            nodes.append((following, factor * own))
    return found


def is_sum(loss: Tensor) -> bool:
    """Return whether the autograd graph shows a sum of losses that is not divided.

    The host may wait to read the factors of the loss from a device.
    """
    node, summed = loss.grad_fn, False
    while node is not None and node.name().startswith(("ToCopy", "Mul", "Div", "Sum", "View")):
        kind = node.name()
        if kind.startswith(("Mul", "Div")) and (summed or _factor(node, host_waits=True) != 1):
            return False
        summed |= kind.startswith("Sum")
        node = node.next_functions[0][0]
    return getattr(node, "_saved_reduction", None) == (NONE if summed else SUM)


def _factor(node: Any, *, host_waits: bool) -> float:
    """Return the factor of a node: NaN for an unknown factor, 1 for an unknown divisor."""
    kind = node.name()
    if not kind.startswith(("MulBackward", "DivBackward")):
        return 1.0
    other = getattr(node, "_saved_other", None)
    if other is None:
        other = getattr(node, "_saved_self", None)
    if isinstance(other, Tensor) and other.device.type != "cpu" and not host_waits:
        other = None
    if other is not None:
        with _disable_current_modes():  # they receive a number of Python as float, not as tensor
            other = float(other.detach() if isinstance(other, Tensor) else other)
    if kind.startswith("Mul"):
        return math.nan if other is None else other
    return 1 / other if other else 1.0


def _check_reduction(module: object, microbatches: object, group: object, divisor: object) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigError("module", type(module).__name__, "must be the torch.nn.Module to train")
    if not (_is_number(microbatches) and isinstance(microbatches, Integral) and microbatches >= 1):
        raise ConfigError("microbatches", microbatches, "must be an integer of 1 or more")
    if group is not None and not isinstance(group, Group):
        raise ConfigError("group", group, "use a process group that has this rank, or a mesh")
    if divisor is not None and not (_is_number(divisor) and 0 < divisor < math.inf):
        raise ConfigError("divisor", divisor, "must be a number above 0")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)  # also numpy scalars
