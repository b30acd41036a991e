"""AdamW that computes in FP32 and keeps its moments, and 16-bit weights, in fewer bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from distmp.errors import ConfigError
from distmp.optim.moments import (
    CODES,
    Place,
    block_size,
    dequantize,
    quantize,
    zero_scales,
)
from distmp.optim.settings import check_state
from distmp.precision.stochastic import indices, parameter_id, random_bits, round_with_bits
from distmp.utils.dtensor import local_values

# Dtype of the second moment, and of first moments without blocks.
_SECOND = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
# Elements that are computed at a time, a multiple of every block: temporary FP32 and int64 values
# of a range take about 60 bytes per element. On CPUs they should fit into the cache.
_RANGE = {"cpu": 2**16}
_RANGE_ON_DEVICE = 2**22


class AdamW(torch.optim.Optimizer):
    """AdamW whose moments take 8 bytes per parameter in FP32, 4 in `bf16` and 3 in `fp8`.

    Every update is computed in FP32 from the stored moments, and then rounded:

    - `bf16`: Both moments are bfloat16. The second moment changes by less than its rounding error
      in each step, so it is rounded stochastically.
    - `fp8`: The first moment is FP8 (e4m3) with an FP32 scale for each block of 32 elements, the
      format of torchao's `OptimStateFp8`. The second moment is as in `bf16`, because the
      squares in a block differ by more than FP8 can represent: elements that become zero would
      take steps of `exp_avg / eps`. Parameters without blocks, such as vectors, are as in `bf16`.
    - `fp32`: Both moments are FP32.

    The bits do not depend on how parameters are sharded. The optimizer unscales gradients and skips
    steps on the device, as torch's fused optimizers do.

    Args:
        params: `[(name, tensor), ...]`, tensors, or groups of those. A group may set `state`.
            Names make random bits independent of the order of parameters.
        lr: Learning rate.
        betas: Coefficients of the moments.
        eps: Term in the denominator of the update.
        weight_decay: Decoupled weight decay.
        state: "fp32", "bf16" or "fp8"; None: the dtype of each weight.
        stochastic_rounding: Whether to round bfloat16 weights stochastically; otherwise to nearest.
            The engine sets it to that of its policy.
        seed: Seed of stochastic rounding.

    Raises:
        ConfigError: If an argument is out of range.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = AdamW(model.named_parameters(), lr=1e-3, state="fp8")
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["exp_avg"].dtype
        torch.float8_e4m3fn
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        _check_betas(betas)
        self.stochastic_rounding = stochastic_rounding
        self._seed = seed
        self._step_supports_amp_scaling = True
        self._places: dict[Tensor, Place] = {}
        defaults = {
            "lr": lr,
            "betas": (betas[0], betas[1]),
            "eps": eps,
            "weight_decay": weight_decay,
            "state": state,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add tensors, as in torch.

        Args:
            param_group: The group; it may set `state`.

        Raises:
            ConfigError: If one of its settings is out of range, or a tensor is complex.
        """
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for tensor in param_group["params"]:
            if tensor.is_complex():
                problem = "is complex, and the moments are real; train torch.view_as_real of it"
                raise ConfigError("optimizer", f"a tensor of shape {tuple(tensor.shape)}", problem)

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps only groups and state. A copy has other tensors, whose shards are not set.
        kept = ("stochastic_rounding", "_seed", "_step_supports_amp_scaling")
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in kept},
            "_places": {},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state, as in torch; the state keeps its dtypes.

        Args:
            state_dict: What `state_dict` returned.
        """
        super().load_state_dict(state_dict)
        # torch has converted the state to the dtypes of the weights.
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        stored = [index for group in state_dict["param_groups"] for index in group["params"]]
        for tensor, index in zip(tensors, stored, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                self.state[tensor][key] = value.clone().to(tensor.device)
        for group in self.param_groups:
            group.setdefault("state", self.defaults["state"])

    def shard(self, places: Mapping[Tensor, Place]) -> None:
        """Set which elements the 1-dim shards of flattened parameters have; DTensors know it.

        Args:
            places: Place of each shard, by its tensor.

        Raises:
            ConfigError: If a shard begins inside of a block of FP8 state.
        """
        self._places = dict(places)
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor in places and (block := self._block(tensor, group)):
                    _check_division(tensor, places[tensor], block)

    def new_state(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update.

        Args:
            parameter: A tensor of the optimizer.
            group: Its group.
        """
        dtype = parameter.dtype if group["state"] is None else _SECOND[group["state"]]
        second = torch.zeros_like(parameter, dtype=dtype, requires_grad=False, **_CONTIGUOUS)
        state = {
            "step": torch.zeros((), device=local_values(parameter).device),
            "exp_avg": second.clone(),
            "exp_avg_sq": second,
        }
        if block := self._block(parameter, group):
            state["exp_avg"] = torch.zeros_like(second, dtype=CODES)
            state["exp_avg_scale"] = zero_scales(parameter, self._place(parameter), block)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss again; optional, as in torch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        number = 0
        for group in self.param_groups:
            names = group.get("param_names") or map(str, itertools.count(number))
            number += len(group["params"])
            for name, parameter in zip(names, group["params"], strict=False):
                if parameter.grad is not None:
                    self._update(name, parameter, group)
        return loss

    def _place(self, parameter: Tensor) -> Place:
        if parameter not in self._places:
            self._places[parameter] = Place.of(parameter)
        return self._places[parameter]

    def _block(self, parameter: Tensor, group: Mapping[str, Any]) -> int | None:
        return block_size(self._place(parameter).shape) if group["state"] == "fp8" else None

    def _update(self, name: str, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.new_state(parameter, group))
        skip = self._count(state["step"])
        update = _Update(group, state["step"], getattr(self, "grad_scale", None), skip)
        assert parameter.grad is not None
        weights, gradient = local_values(parameter), local_values(parameter.grad).reshape(-1)
        # A copy if the memory format is another one: elements are counted in row-major order.
        flat = weights.reshape(-1)
        moments = {key: _flat(local_values(state[key])) for key in state if key != "step"}
        place = self._place(parameter)
        block = block_size(place.shape) if "exp_avg_scale" in state else None
        for part in _ranges(flat):
            bits = None
            if self._needs_bits(flat, moments):
                index = indices(place.start + part.start, part.stop - part.start, flat.device)
                bits = random_bits(
                    index, seed=self._seed, step=state["step"], parameter=parameter_id(name)
                )
            values = {key: value[_of_blocks(part, block, key)] for key, value in moments.items()}
            self._update_range(update, flat[part], gradient[part], values, block, bits)
        if not weights.is_contiguous():
            weights.copy_(flat.view(weights.shape))

    def _count(self, step: Tensor) -> Tensor | None:
        """Count an update unless it is skipped; return whether it is, on the device, if known."""
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is None:
            step += 1
            return None
        skip = found_inf.reshape(()).to(step.device) != 0
        step += (~skip).float()
        return skip

    def _needs_bits(self, weights: Tensor, moments: Mapping[str, Tensor]) -> bool:
        rounds_weights = self.stochastic_rounding and weights.dtype == torch.bfloat16
        return rounds_weights or moments["exp_avg_sq"].dtype == torch.bfloat16

    def _update_range(
        self,
        update: _Update,
        weights: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        block: int | None,
        bits: Tensor | None,
    ) -> None:
        """Update consecutive elements in place.

        Args:
            update: The numbers of the update.
            weights: 1-dim.
            gradient: 1-dim.
            state: The moments and scales of these elements, 1-dim.
            block: Number of elements that share a scale of the first moment; None: no scales.
            bits: 32 random bits for each element, or None if nothing is rounded stochastically.
        """
        if block is None:
            first = state["exp_avg"].float()
        else:
            first = dequantize(state["exp_avg"], state["exp_avg_scale"], block)
        first, second, result = update.compute(
            weights.float(), gradient, first, state["exp_avg_sq"].float()
        )
        stochastic = bits if self.stochastic_rounding else None
        update.store(weights, _rounded(result, weights.dtype, stochastic))
        upper = None if bits is None else bits >> 16
        update.store(state["exp_avg_sq"], _rounded(second, state["exp_avg_sq"].dtype, upper))
        if block is None:
            update.store(state["exp_avg"], first.to(state["exp_avg"].dtype))
            return
        codes, scales = quantize(first, block)
        update.store(state["exp_avg"], codes)
        update.store(state["exp_avg_scale"], scales)


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

    def compute(
        self, weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the new moments and weights, FP32.

        Args:
            weights: FP32.
            gradient: In any dtype.
            first: First moment, FP32.
            second: Second moment, FP32.
        """
        gradient = gradient.float()
        if self._grad_scale is not None:
            gradient = gradient / self._grad_scale
        first = first.lerp(gradient, 1 - self._betas[0])
        second = second * self._betas[1] + gradient * gradient * (1 - self._betas[1])
        denominator = second.sqrt() / self._root + self._eps
        return first, second, weights * self._decay - first / denominator * self._rate

    def store(self, old: Tensor, new: Tensor) -> None:
        """Write new values over old ones, unless the step is skipped; the host does not wait."""
        if self._skip is None:
            old.copy_(new)
            return
        if old.dtype == CODES:  # torch.where does not support FP8
            old, new = old.view(torch.uint8), new.view(torch.uint8)
        torch.where(self._skip, old, new, out=old)


_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}


def _flat(values: Tensor) -> Tensor:
    return values.as_subclass(Tensor).view(-1)


def _ranges(values: Tensor) -> Iterator[slice]:
    """Yield the ranges of elements that are computed at a time."""
    most = _RANGE.get(values.device.type, _RANGE_ON_DEVICE)
    for first in range(0, len(values), most):
        yield slice(first, min(first + most, len(values)))


def _of_blocks(part: slice, block: int | None, key: str) -> slice:
    """Return which values of a state belong to some elements of the parameter."""
    if key != "exp_avg_scale" or block is None:
        return part
    return slice(part.start // block, part.stop // block)


def _rounded(values: Tensor, dtype: torch.dtype, bits: Tensor | None) -> Tensor:
    """Return values in a dtype, rounded to bfloat16 by the lower 16 of the random bits, if any."""
    if dtype == torch.bfloat16 and bits is not None:
        return round_with_bits(values, bits & 0xFFFF)
    return values.to(dtype)


def _check_division(tensor: Tensor, place: Place, block: int) -> None:
    if place.start % block or tensor.numel() % block:
        raise ConfigError(
            "optim.state",
            "fp8",
            f"needs shards of whole blocks of {block} elements, and this strategy divides a "
            f"parameter of shape {tuple(place.shape)} at {place.start}; use the strategy fsdp, or "
            "optim.state = 'bf16'",
        )


def _check(group: Mapping[str, Any]) -> None:
    """Refuse settings of a group that would train something else than AdamW.

    Raises:
        ConfigError: If one is invalid; it names the option.
    """
    check_state(group["state"], "optim.state")
    _check_betas(group["betas"])
    names = {"lr": "optim.lr", "weight_decay": "optim.weight_decay", "eps": "optim.options.eps"}
    for name, setting in names.items():
        value = group[name]
        if isinstance(value, Tensor):  # torch's schedules may change a learning rate on a device
            if value.numel() != 1:
                raise ConfigError(setting, tuple(value.shape), "use a tensor with one element")
        elif not (_is_number(value) and 0 <= value < math.inf):
            raise ConfigError(setting, value, "use a finite number of 0 or more")


def _check_betas(betas: Any) -> None:
    given = betas if isinstance(betas, Sequence) else ()
    if len(given) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in given):
        raise ConfigError(
            "optim.options.betas", betas, "use two numbers of at least 0 and less than 1"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
