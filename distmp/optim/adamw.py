"""AdamW that computes in FP32, and rounds weights stochastically."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from distmp.errors import require
from distmp.precision.stochastic import indices, parameter_id, random_bits, round_with_bits
from distmp.utils.dtypes import is_dtensor, local_values
from distmp.utils.flat_shard import FlatShard, local_parts

# Elements that are computed at a time: temporary FP32 and int64 values of a range take about 60
# bytes per element. On CPUs they should fit into the cache.
_RANGE = {"cpu": 2**16}
_RANGE_ON_DEVICE = 2**22
# Attributes of `AdamW` that its copies have, too.
_COPIED = ("stochastic_rounding", "_seed", "_starts", "_step_supports_amp_scaling")


class AdamW(torch.optim.AdamW):
    """AdamW that computes in FP32, and keeps its moments in the dtype of each weight.

    Every update is computed in FP32 from the stored moments and weights, and then rounded. The
    second moment changes by less than the rounding error of bfloat16 in each step, so it is rounded
    stochastically in bfloat16.

    The bits do not depend on how parameters are sharded. The optimizer unscales gradients and skips
    steps on the device, as torch's fused optimizers do.

    Args:
        params: `[(name, tensor), ...]`, tensors, or groups of those. Names make random bits
            independent of the order of parameters.
        lr: Learning rate.
        betas: Coefficients of the moments.
        eps: Term in the denominator of the update.
        weight_decay: Decoupled weight decay.
        stochastic_rounding: Whether to round bfloat16 weights stochastically; otherwise to nearest.
            The engine sets it to that of its policy.
        seed: Seed of stochastic rounding.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = AdamW(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.float32
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        self.stochastic_rounding = stochastic_rounding
        self._seed = seed
        self._starts: dict[Tensor, int] = {}
        super().__init__(params, lr, (float(betas[0]), float(betas[1])), eps, weight_decay)
        self._step_supports_amp_scaling = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _COPIED}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A state of torch's AdamW has the strides of its weight; `new_state` is contiguous.
        for values in self.state.values():
            for key in values.keys() & {"exp_avg", "exp_avg_sq"}:
                values[key] = values[key].contiguous()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add tensors, as in torch.

        Args:
            param_group: The group.

        Raises:
            ConfigError: If a tensor is complex, or float16 and not frozen.
        """
        super().add_param_group(param_group)
        for tensor in param_group["params"]:
            shape = f"a tensor of shape {tuple(tensor.shape)}"
            problem = "is complex, and the moments are real; train torch.view_as_real of it"
            require(not tensor.is_complex(), "optimizer", shape, problem)
            problem = "is float16, in which the second moment underflows; use float32 or bfloat16"
            is_trained = tensor.requires_grad and tensor.dtype == torch.float16
            require(not is_trained, "optimizer", shape, problem)

    def shard(self, starts: Mapping[Tensor, int]) -> None:
        """Set which elements of the flattened parameters the 1-dim shards hold; not for DTensors.

        Args:
            starts: Index of the first element in the flattened full parameter, by shard.
        """
        self._starts = dict(starts)

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        moment = torch.zeros_like(
            parameter, requires_grad=False, memory_format=torch.contiguous_format
        )
        return {
            "step": torch.zeros((), dtype=torch.float32, device=local_values(parameter).device),
            "exp_avg": moment.clone(),
            "exp_avg_sq": moment,
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss again; optional, as in torch.

        Raises:
            ConfigError: If a group, or a state of torch's AdamW, sets `amsgrad` or `maximize`.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        number = 0
        problem = "is an option that this optimizer lacks; use torch.optim.AdamW"
        for option in ("amsgrad", "maximize"):
            given = any(group[option] for group in self.param_groups)
            require(not given, "optimizer", option, problem)
        for group in self.param_groups:
            names = group.get("param_names") or map(str, itertools.count(number))
            number += len(group["params"])
            for name, parameter in zip(names, group["params"], strict=False):
                if parameter.grad is not None:
                    self._update(name, parameter, group)
        return loss

    def _start(self, parameter: Tensor) -> int:
        if parameter not in self._starts:
            self._starts[parameter] = start_of(parameter)
        return self._starts[parameter]

    def _update(self, name: str, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.new_state(parameter))
        skip = self._count(state["step"])
        update = _Update(group, state["step"], getattr(self, "grad_scale", None), skip)
        assert parameter.grad is not None
        weights, gradient = local_values(parameter), local_values(parameter.grad).reshape(-1)
        # A copy if the memory format is another one: elements are counted in row-major order.
        flat = weights.reshape(-1)
        first, second = (local_values(state[key]).view(-1) for key in ("exp_avg", "exp_avg_sq"))
        rounds = self.stochastic_rounding and flat.dtype == torch.bfloat16
        start = self._start(parameter)
        for part in _ranges(flat):
            bits = None
            if rounds or second.dtype == torch.bfloat16:
                index = indices(start + part.start, part.stop - part.start, flat.device)
                bits = random_bits(
                    index, seed=self._seed, step=state["step"], parameter=parameter_id(name)
                )
            weight_bits = bits if self.stochastic_rounding else None
            update.apply(flat[part], gradient[part], first[part], second[part], weight_bits, bits)
        if not weights.is_contiguous():
            weights.copy_(flat.view(weights.shape))

    def _count(self, step: Tensor) -> Tensor | None:
        """Count an update unless it is skipped; return whether it is, 0-dim bool, or None."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            step += 1
            return None
        skip = found_inf.reshape(()).to(step.device) != 0
        step += (~skip).float()
        return skip


class _Update:
    """The numbers of one update of a parameter.

    Args:
        group: Its group.
        step: Number of the update, 0-dim on the device.
        grad_scale: Divisor of the gradient; None: 1.
        skip: Whether the update is skipped, 0-dim bool on the device; None: it is applied.
    """

    def __init__(
        self,
        group: Mapping[str, Any],
        step: Tensor,
        grad_scale: Tensor | None,
        skip: Tensor | None,
    ) -> None:
        self._betas, self._eps = group["betas"], group["eps"]
        lr = group["lr"]
        # In FP64: 1 - beta^step has few correct digits in FP32.
        corrections = [1 - beta ** step.double() for beta in self._betas]
        self._rate = (lr / corrections[0]).float()
        self._root = corrections[1].sqrt().float()
        self._decay = 1 - lr * group["weight_decay"]
        self._grad_scale, self._skip = grad_scale, skip

    def apply(
        self,
        weights: Tensor,
        gradient: Tensor,
        first: Tensor,
        second: Tensor,
        weight_bits: Tensor | None,
        moment_bits: Tensor | None,
    ) -> None:
        """Update consecutive elements in place.

        Args:
            weights: 1-dim.
            gradient: 1-dim.
            first: First moment, 1-dim.
            second: Second moment, 1-dim.
            weight_bits: 32 random bits for each element, whose lower 16 round the weights; None:
                they are rounded to nearest.
            moment_bits: Random bits whose upper 16 round the second moment.
        """
        gradient = gradient.float()
        if self._grad_scale is not None:
            gradient = gradient / self._grad_scale
        new_first = first.float().lerp(gradient, 1 - self._betas[0])
        new_second = second.float() * self._betas[1] + gradient * gradient * (1 - self._betas[1])
        denominator = new_second.sqrt() / self._root + self._eps
        result = weights.float() * self._decay - new_first / denominator * self._rate
        upper = None if moment_bits is None else moment_bits >> 16
        store(weights, _rounded(result, weights.dtype, weight_bits), self._skip)
        store(second, _rounded(new_second, second.dtype, upper), self._skip)
        store(first, new_first.to(first.dtype), self._skip)


def store(old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Write new values over old ones, unless `skip`, 0-dim, is true; the host does not wait."""
    if skip is None:
        old.copy_(new)
    else:
        torch.where(skip, old, new, out=old)


def match_memory_formats(parameters: Iterable[Tensor], states: Mapping[Tensor, Any]) -> None:
    """Store loaded state in the memory format of its parameter, which fused kernels assume."""
    for parameter in parameters:
        state = states.get(parameter, {})
        for key, value in state.items():
            is_full = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_full and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _ranges(values: Tensor) -> Iterator[slice]:
    """Yield the ranges of elements that are computed at a time."""
    most = _RANGE.get(values.device.type, _RANGE_ON_DEVICE)
    for first in range(0, len(values), most):
        yield slice(first, min(first + most, len(values)))


def _rounded(values: Tensor, dtype: torch.dtype, bits: Tensor | None) -> Tensor:
    """Return values in a dtype, rounded to bfloat16 by the lower 16 of the random bits, if any."""
    if dtype == torch.bfloat16 and bits is not None:
        return round_with_bits(values, bits & 0xFFFF)
    return values.to(dtype)


def start_of(tensor: Tensor) -> int:
    """Return the index of the first element of a tensor in the flattened full parameter.

    Args:
        tensor: A full parameter, a `FlatShard`, or a DTensor sharded by rows.

    Raises:
        ConfigError: For a DTensor that is sharded along another dimension.
    """
    if isinstance(tensor, FlatShard):
        return tensor.start
    if not is_dtensor(tensor):
        return 0
    problem = (
        f"has a parameter that is sharded as {tensor.placements}, not by rows; use "
        "torch.optim.AdamW for tensor-parallel parameters"
    )
    by_rows = all(placement.is_shard(0) for placement in tensor.placements if placement.is_shard())
    require(by_rows, "optimizer", "AdamW", problem)
    # Without an element, the index of the first one does not matter.
    index = next((index for index, _ in local_parts(tensor)), ())
    return int(index[0].start) * tensor.shape[1:].numel() if index else 0
