"""Loss and metrics of an evaluation, from one forward per microbatch, and outputs of all ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from distmp.data.evaluation import ForwardOnly
from distmp.distributed.comparison import raise_difference
from distmp.distributed.progress import VALIDATION, current_phase
from distmp.distributed.stopping import until_stop_requested
from distmp.distributed.world import World
from distmp.engine.likely_mistakes import MEAN, Means
from distmp.engine.setup import EngineSetup, return_logits
from distmp.engine.state import EngineState
from distmp.engine.step import forward, random_stream
from distmp.errors import ConfigError, require
from distmp.precision.keep import product_switches
from distmp.utils.dtypes import dtype_name
from distmp.utils.generators import generators_kept, seed_generators
from distmp.utils.host_copy import moved

# metric(outputs, batch) -> (sum, weight)
MetricFunction = Callable[[Any, Any], "tuple[Tensor | float, Tensor | float]"]


class Evaluation(NamedTuple):
    """The result of an evaluation, the same on every rank.

    Attributes:
        loss: Mean loss over the global weight; NaN if that is 0, or a weight is negative.
        metrics: Mean of each metric over its global weight, by name; NaN as for the loss.

    Example:
        >>> import torch, distmp
        >>> engine = distmp.Engine(
        ...     torch.nn.Linear(8, 4),
        ...     lambda module, batch: (module(batch).square().sum(), len(batch)),
        ...     lambda named: torch.optim.AdamW(named, fused=True),
        ...     policy="fp32",
        ... )
        >>> rows = {"rows_of_ones": lambda outputs, batch: (batch.mean(1).eq(1).sum(), len(batch))}
        >>> batch = torch.tensor([[1.0] * 8, [0.0] * 8])
        >>> engine.evaluate_metrics([batch], rows).metrics
        {'rows_of_ones': 0.5}
    """

    loss: float
    metrics: dict[str, float]


class MetricSums:
    """Sums loss and metrics of microbatches on the device, in FP64.

    Args:
        metrics: The functions, by name.
        device: The device.
        checks: Whether to warn of a mean in the first microbatch.
    """

    def __init__(
        self, metrics: Mapping[str, MetricFunction], device: torch.device, *, checks: bool
    ) -> None:
        self._metrics, self._checks = dict(metrics), checks
        self._total = torch.zeros(1 + len(metrics), 2, dtype=torch.float64, device=device)
        self._microbatches = 0
        self._warnings: list[str] = []

    def add(self, batch: Any, loss_sum: Tensor, weight: Tensor | float, outputs: list[Any]) -> None:
        """Add a microbatch.

        Args:
            batch: The microbatch on the device.
            loss_sum: Sum of its losses, 0-dim.
            weight: Weight of the loss, 0-dim, or a number.
            outputs: Return value of each call of the model.
        """
        checks = self._checks and self._microbatches == 0
        self._microbatches += 1
        rows = [torch.stack([loss_sum.to(self._total), self._total.new_zeros(()) + weight])]
        for name, metric in self._metrics.items():
            with Means() if checks else nullcontext() as means:
                result = metric(_output(outputs), batch)
            rows.append(self._row(name, result))
            if means is not None and means.include([*result][:1]) and rows[-1][1] > 1:
                text = MEAN.format(f"the metric {name!r}", float(rows[-1][1]), "its result")
                self._warnings.append(text)
        values = torch.stack(rows)
        # The mean of nothing may be NaN.
        is_nothing = (values[:, 1:] == 0) & values.isnan()
        values[1:] = torch.where(is_nothing[1:], 0.0, values[1:])
        # A mean with negative weights would be wrong, but look plausible.
        self._total += torch.where(values[:, 1:] < 0, math.nan, values)

    def result(self, group: dist.ProcessGroup | None, *, may_be_empty: bool) -> Evaluation:
        """Return the means over all ranks, in one all-reduce; the host waits.

        Raises:
            ConfigError: On all ranks, if there was no microbatch, unless `may_be_empty`.
        """
        totals = torch.cat([self._total, self._total.new_tensor([[self._microbatches, 0]])])
        if group is not None:
            dist.all_reduce(totals, group=group)
        *sums, (microbatches, _) = totals.tolist()
        for text in self._warnings:  # after the all-reduce, because a filter may make it an error
            # At the call of `Engine.evaluate_metrics`, which has two decorators.
            warnings.warn(text, RuntimeWarning, stacklevel=6)
        problem = (
            "there is nothing to evaluate; an iterator gives its batches only once, so pass "
            "another one each time: loader.once()"
        )
        require(microbatches > 0 or may_be_empty, "microbatches", "none on any rank", problem)
        loss, *metrics = (total / weight if weight else math.nan for total, weight in sums)
        return Evaluation(loss, dict(zip(self._metrics, metrics, strict=True)))

    def _row(self, name: str, result: Any) -> Tensor:
        """Return the sum and the weight of a metric as FP64 [2]."""
        try:
            total, weight = (
                torch.as_tensor(value, dtype=torch.float64).detach().reshape(()) for value in result
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"validation.metrics.{name}",
                type(result).__name__,
                "return a tuple of a sum over the microbatch and its weight, each a number or a "
                "tensor with one element",
            ) from error
        return torch.stack([total.to(self._total), weight.to(self._total)])


def evaluate(
    setup: EngineSetup,
    state: EngineState,
    microbatches: Iterable[Any],
    metrics: Mapping[str, MetricFunction],
) -> Evaluation:
    """Return the mean loss and the means of metrics, see `Engine.evaluate_metrics`."""
    compared = microbatches
    if setup.is_sharded and not isinstance(microbatches, until_stop_requested):
        compared = _same_number(microbatches, setup)
    checks = setup.config.first_step_checks and setup.world.rank == 0
    sums = MetricSums(metrics, setup.device, checks=checks)
    stream = random_stream(setup, state, "evaluation")
    module = setup.strategy.module
    with (
        evaluation_mode(module),
        product_switches(setup.policy),
        recorded_outputs(module, active=bool(metrics)) as outputs,
    ):
        for index, batch in enumerate(current_phase.each(VALIDATION, compared)):
            counts = not isinstance(batch, ForwardOnly)
            batch = moved(batch if counts else batch.batch, setup.device)
            with generators_kept(setup.device):
                seed_generators(f"{stream} {index}", setup.device)
                loss_sum, weight = forward(setup, batch)
            if counts:
                sums.add(batch, loss_sum, weight, outputs)
            outputs.clear()
    # A stop ends the batches of a run's validation, perhaps before the first one.
    ended = isinstance(microbatches, until_stop_requested) and microbatches.ended_early
    return sums.result(setup.world.group, may_be_empty=ended)


def _same_number(microbatches: Iterable[Any], setup: EngineSetup) -> Iterator[Any]:
    """Yield microbatches; raise an error if other ranks have more or fewer of them."""
    for batch in microbatches:
        setup.strategy.compare_next(True)
        yield batch
    setup.strategy.compare_next(False)


@contextmanager
def recorded_outputs(module: nn.Module, *, active: bool) -> Iterator[list[Any]]:
    """Record the outputs of a module; models that compute their loss return logits.

    Args:
        module: The module that the loss function calls.
        active: False records nothing and changes nothing.
    """
    outputs: list[Any] = []

    def record(_module: nn.Module, _arguments: Any, output: Any) -> None:
        outputs.append(output)

    with ExitStack() as restored:
        if active:
            restored.callback(module.register_forward_hook(record).remove)
            for part in return_logits(module):
                restored.callback(setattr, part, "takes_targets", True)
        yield outputs


def _output(outputs: list[Any]) -> Any:
    """Return the output of the model; a tuple if the loss function called it several times.

    Raises:
        ConfigError: If the loss function did not call it.
    """
    problem = (
        "the loss function did not call the model that is passed to it, only parts of it, so "
        "metrics have no output; call model(...)"
    )
    require(bool(outputs), "validation.metrics", "outputs", problem)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set a module to evaluation mode in a `with` block, and restore the mode of each part."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        # Parents first, as their own methods set their children, too.
        for part, mode in modes:
            if part.training != mode and type(part).train is not nn.Module.train:
                part.train(mode)  # may do more, such as separating merged adapters
            part.training = mode


T = TypeVar("T")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE_NUMBERS = (*_INTEGERS.values(), torch.int8)


def gather_rows(values: T, samples: Tensor | None, world: World) -> T:
    """Gather values per sample from all ranks; see `Engine.gather`."""
    leaves, structure = pytree.tree_flatten(values)
    tensors = leaves if samples is None else [*leaves, samples]
    problem = _problem(tensors, has_samples=samples is not None)
    described = {"structure of values": str(structure)}
    own: list[Tensor] = []
    if problem is None:
        names = [f"tensor {index} of values" for index in range(len(leaves))] + ["samples"]
        described |= dict(zip(names, map(_described, tensors), strict=False))
        own = [_as_integers(tensor) for tensor in tensors]
    by_rank = world.ranks.gather((problem, described, own))
    for rank, (found, _, _) in enumerate(by_rank):
        if found is not None:
            setting, value, text = found
            raise ConfigError(setting, value, f"{text} (rank {rank})")
    if any(other != described for _, other, _ in by_rank):
        raise_difference(world.group, described)
    pieces = zip(*(rows for _, _, rows in by_rank), strict=True)
    gathered = [
        torch.cat(rows).view(tensor.dtype).to(tensor.device)
        for rows, tensor in zip(pieces, tensors, strict=True)
    ]
    if samples is not None:
        chosen = _once_in_order(gathered.pop())
        gathered = [tensor[chosen.to(tensor.device)] for tensor in gathered]
    return pytree.tree_unflatten(gathered, structure)


def _problem(tensors: list[Any], *, has_samples: bool) -> tuple[str, str, str] | None:
    """Return why these values cannot be gathered, as the arguments of a `ConfigError`."""
    if not tensors:
        return "values", "{}", "has no tensor to gather"
    if others := [type(each).__name__ for each in tensors if not isinstance(each, Tensor)]:
        return "values", others[0], "is not a tensor; gather tensors with a row for each sample"
    if has_samples and (tensors[-1].dim() != 1 or tensors[-1].dtype not in _SAMPLE_NUMBERS):
        text = f"{tuple(tensors[-1].shape)} and {dtype_name(tensors[-1].dtype)}"
        return "samples", text, "must be integers of shape (rows,), the indices of the samples"
    counts = sorted({len(torch.atleast_1d(tensor)) for tensor in tensors})
    if len(counts) > 1:
        problem = "must be the same in all tensors, which have a row for each sample"
        return "number of rows", " and ".join(map(str, counts)), problem
    return None


def _described(tensor: Tensor) -> str:
    return f"rows of shape {tuple(tensor.shape[1:])} and {dtype_name(tensor.dtype)}"


def _as_integers(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, as integers: torch does not unpickle every dtype."""
    # A copy leaves out the rest of the memory that a view keeps alive.
    rows = torch.atleast_1d(tensor.detach().resolve_conj().resolve_neg()).cpu()
    rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(_INTEGERS.get(rows.itemsize, rows.dtype))


def _once_in_order(samples: Tensor) -> Tensor:
    """Return the indices of the rows to keep: the first of each sample, sorted by sample."""
    numbers, order = samples.sort(stable=True)
    is_first = torch.ones_like(numbers, dtype=torch.bool)
    is_first[1:] = numbers[1:] != numbers[:-1]
    return order[is_first & (numbers >= 0)]
