"""Checks that settings are the same on every rank, and names the ranks that differ.

Ranks compare small checksums, and exchange the values only if the checksums differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.distributed.failing_together import Ranks
from distmp.errors import ConfigError, TrainingError, keys_by_value, listed, rank_names
from distmp.utils.dtypes import dtype_name
from distmp.utils.host_copy import cpu_number
from distmp.utils.tensor_trees import tensors_in

ADVICE = "differs between ranks; use the same on every rank"
# Bits of a checksum that is reduced as a floating-point number: sums of the squares of 2^17 such
# numbers are exact in FP64.
FINGERPRINT_BITS = 18


def describe_model(model: nn.Module) -> dict[str, str]:
    """Return parameters, buffers and modules as text, in order, for a comparison between ranks."""
    parameters = describe_parameters(model.named_parameters(), "model.")
    buffers = {
        f"model.buffers[{index}]": f"{name} {describe_tensor(buffer)}"
        for index, (name, buffer) in enumerate(model.named_buffers())
    }
    modules = {
        f"model.{name or 'root'}": type(module).__name__ for name, module in model.named_modules()
    }
    return parameters | buffers | modules


def describe_parameters(named: Iterable[tuple[str, Tensor]], prefix: str = "") -> dict[str, str]:
    """Return parameters as text, in order, for a comparison between ranks."""
    return {
        f"{prefix}parameters[{index}]": f"{name} {describe_tensor(parameter)}"
        f"{'' if parameter.requires_grad else ', frozen'}"
        for index, (name, parameter) in enumerate(named)
    }


def describe_tensor(tensor: Tensor) -> str:
    """Return shape and dtype of a tensor as text."""
    return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"


def describe_param_groups(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the class and the parameter groups of an optimizer as text, for a comparison."""
    described = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in on_host(group):
            if key not in ("params", "param_names"):
                described[f"optimizer.param_groups[{index}][{key!r}]"] = repr(value)
        names = group.get("param_names", range(len(group["params"])))
        described[f"optimizer.param_groups[{index}]['params']"] = listed(list(map(str, names)))
    return described


def check_same(
    group: dist.ProcessGroup | None,
    device: torch.device,
    described: Mapping[str, str],
    advice: str = ADVICE,
) -> None:
    """Compare a description between ranks, in one collective if it is the same.

    Every rank of the group has to call it.

    Args:
        group: The ranks; None for a single process.
        device: The device that this rank communicates from.
        described: Values as text by name, the most important first.
        advice: What to do about a difference, the end of the message.

    Raises:
        ConfigError: On every rank, with the first entry that differs and its values by rank.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    checksum = zlib.crc32(repr(list(described.items())).encode())
    extremes = torch.tensor([checksum, -checksum], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    largest, negated_smallest = extremes.tolist()
    if largest != -negated_smallest:
        raise_difference(group, described, advice)


def raise_difference(
    group: dist.ProcessGroup | None, described: Mapping[str, str], advice: str = ADVICE
) -> None:
    """Raise an error that names what differs between ranks; every rank has to call it.

    Args:
        group: The ranks; None for a single process.
        described: Values as text by name, the most important first.
        advice: What to do about a difference, the end of the message.

    Raises:
        ConfigError: On every rank, with the first entry that differs and its values by rank.
        TrainingError: If nothing in the descriptions differs.
    """
    own = dict(described)
    by_rank = [own] if group is None else Ranks(group).gather(own)
    for name, by_value in differences(dict(enumerate(by_rank)), absent="nothing"):
        text = "; ".join(f"{value} on {rank_names(ranks)}" for value, ranks in by_value.items())
        raise ConfigError(name, _Unquoted(text), advice)
    raise TrainingError(
        "ranks have called the engine differently; make the same calls in the same order on "
        "every rank"
    )


def differences(
    by_rank: Mapping[int, Mapping[str, str]], *, absent: str
) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """Yield the names whose values differ between ranks, with the ranks of each value.

    Args:
        by_rank: Values as text by name, of each rank.
        absent: Value of a rank that does not have a name.
    """
    for name in dict.fromkeys(name for values in by_rank.values() for name in values):
        by_value = keys_by_value({r: values.get(name, absent) for r, values in by_rank.items()})
        if len(by_value) > 1:
            yield name, by_value


class Fingerprint:
    """A checksum of the arguments of a call, compared between ranks as part of an all-reduce.

    Ranks sum the checksum and its square, exactly in FP64. From both follows the sum of the squared
    differences from the checksum of this rank, which is 0 only if all are equal.

    Args:
        checksum: An integer of `FINGERPRINT_BITS` bits.
        world_size: Number of ranks.
    """

    def __init__(self, checksum: int, world_size: int) -> None:
        self._checksum = checksum
        self._world_size = world_size

    @classmethod
    def of(cls, values: object, world_size: int) -> Fingerprint:
        """Return the fingerprint of numbers, strings, and lists and tuples of them."""
        return cls(zlib.crc32(repr(values).encode()) % 2**FINGERPRINT_BITS, world_size)

    @property
    def terms(self) -> list[float]:
        """The numbers to sum over ranks; empty for a single rank."""
        return [self._checksum, self._checksum**2] if self._world_size > 1 else []

    def sum_over_ranks(
        self, values: Tensor, all_reduce: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Sum values over ranks and compare the fingerprints in the same all-reduce.

        Args:
            values: FP64, 1-dim.
            all_reduce: Returns the sum of an FP64 vector over the ranks.

        Returns:
            The sums, of the shape of `values`, and what `differs` returns.
        """
        # Filled on the device: a tensor made from Python numbers would make the host wait.
        terms = [torch.full_like(values[:1], term) for term in self.terms]
        sums = all_reduce(torch.cat([values, *terms]))
        return sums[: len(values)], self.differs(sums[len(values) :])

    def differs(self, sums: Tensor) -> Tensor:
        """Return whether fingerprints of ranks differ, 0-dim bool, the same on all ranks.

        Args:
            sums: FP64, shape (2,), the sums of `terms` over the ranks; shape (0,) for one rank.
        """
        if self._world_size == 1:
            return sums.new_zeros((), dtype=torch.bool)
        # The sum of squared differences from this rank, without its own square.
        others = torch.add(sums[1], sums[0], alpha=-2 * self._checksum)
        return others != -self._world_size * self._checksum**2


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[object]:
    """Return the class and the settings of the parameter groups that the host knows."""
    known = (bool, int, float, str, tuple, type(None))
    groups = [
        [(key, value) for key, value in on_host(group) if isinstance(value, known)]
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, *groups]


def on_host(group: Mapping[str, Any], *, waits: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a parameter group; lists of numbers as tuples, which do not change.

    Args:
        group: The group.
        waits: Whether to wait for tensors on other devices, which are left out otherwise.
    """
    for key, value in group.items():
        if isinstance(value, list) and value and all(isinstance(n, int | float) for n in value):
            yield key, tuple(value)
        # The text of tensors has the device, which differs between ranks, and costs a wait.
        elif not isinstance(value, Tensor | tuple | list) or not tensors_in(value):
            yield key, value
        elif isinstance(value, Tensor) and value.numel() == 1 and (waits or value.is_cpu):
            yield key, value.item() if waits else cpu_number(value.double().reshape(()))


class _Unquoted(str):
    """Text that an error message shows without quotes."""

    def __repr__(self) -> str:
        return str(self)
