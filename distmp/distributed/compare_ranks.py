"""What has to be the same on every rank, and which ranks differ where it is not.

Ranks compare small checksums; only where those differ do they tell each other the values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distmp.errors import ConfigError, TrainingError, listed
from distmp.utils.dtypes import dtype_name

ADVICE = "differs between ranks; use the same on every rank"
# Bits of a checksum that travels as a floating-point number: sums of the squares of 2^17 such
# numbers are exact in FP64.
FINGERPRINT_BITS = 18


def described_model(model: nn.Module) -> dict[str, str]:
    """Return parameters, buffers and modules in words, in order, for a comparison between ranks."""
    parameters = {
        f"model.{entry}": value
        for entry, value in described_parameters(model.named_parameters()).items()
    }
    buffers = {
        f"model.buffers[{index}]": f"{name} {_in_words(buffer)}"
        for index, (name, buffer) in enumerate(model.named_buffers())
    }
    modules = {
        f"model.{name or 'root'}": type(part).__name__ for name, part in model.named_modules()
    }
    return parameters | buffers | modules


def described_parameters(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return parameters in words, in order, for a comparison between ranks."""
    return {
        f"parameters[{index}]": f"{name} {_in_words(parameter)}"
        f"{'' if parameter.requires_grad else ', frozen'}"
        for index, (name, parameter) in enumerate(named)
    }


def described_groups(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return an optimizer's class and the numbers in its groups in words, for a comparison."""
    described = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names") and not isinstance(value, Tensor):
                described[f"optimizer.param_groups[{index}][{key!r}]"] = repr(value)
        names = group.get("param_names", range(len(group["params"])))
        described[f"optimizer.param_groups[{index}]['params']"] = listed(list(map(str, names)))
    return described


def check_same(
    group: dist.ProcessGroup | None, device: torch.device, described: Mapping[str, str]
) -> None:
    """Compare a description between ranks, in one collective if it is the same; all call it.

    Args:
        group: The ranks; None for a single process.
        device: Where this rank communicates.
        described: Names to values in words, what matters most first.

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
        raise_difference(group, described)


def raise_difference(group: dist.ProcessGroup | None, described: Mapping[str, str]) -> None:
    """Raise what differs between ranks; all call it.

    Raises:
        ConfigError: On every rank, with the first entry that differs and its values by rank.
        TrainingError: If nothing in the descriptions differs.
    """
    everyone: list[Any] = [dict(described)]
    if group is not None:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, dict(described), group=group)
    for name in dict.fromkeys(name for one in everyone for name in one):
        values = [one.get(name, "nothing") for one in everyone]
        if len(set(values)) > 1:
            raise ConfigError(name, _Words(_by_rank(values)), ADVICE)
    raise TrainingError(
        "ranks have called the engine differently; make the same calls in the same order on "
        "every rank"
    )


def checksum_terms(checksum: int) -> list[float]:
    """Return what ranks sum to see whether their checksums are equal: the number and its square."""
    return [checksum, checksum**2]


def checksums_differ(sums: Tensor, checksum: int, world_size: int) -> Tensor:
    """Return whether some ranks have another checksum, 0-dim bool, the same on every rank.

    Args:
        sums: FP64, shape (2,), the exact sums of `checksum_terms` over the ranks. They are those of
            equal numbers only if all numbers are equal.
        checksum: That of this rank, of `FINGERPRINT_BITS` bits.
        world_size: Number of ranks.
    """
    # Compared with numbers of the host one by one, so that nothing is copied to the device.
    first, second = (world_size * term for term in checksum_terms(checksum))
    return (sums[0] != first) | (sums[1] != second)


class Fingerprint:
    """A checksum of what a rank takes a step with, on its way to the others in an FP64 vector.

    Args:
        numbers: Numbers, texts, and lists and tuples of them.
        world_size: Number of ranks.
    """

    def __init__(self, numbers: object, world_size: int) -> None:
        self._checksum = zlib.crc32(repr(numbers).encode()) % 2**FINGERPRINT_BITS
        self._world_size = world_size

    @property
    def terms(self) -> list[float]:
        """What is to be summed over ranks; nothing for a single one."""
        return checksum_terms(self._checksum) if self._world_size > 1 else []

    def differs(self, sums: Tensor) -> Tensor:
        """Return whether some ranks have another one, see `checksums_differ`.

        Args:
            sums: FP64, the sums of `terms`.
        """
        if self._world_size == 1:
            return sums.new_zeros((), dtype=torch.bool)
        return checksums_differ(sums, self._checksum, self._world_size)


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[object]:
    """Return the numbers in an optimizer's groups that the host knows."""
    known = (bool, int, float, str, tuple, type(None))
    groups = [
        [(key, value) for key, value in group.items() if isinstance(value, known)]
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, *groups]


class _Words(str):
    """Text that an error shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _in_words(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)}"


def _by_rank(values: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(
        f"{value} on rank{'s' if len(who) > 1 else ''} {listed(who)}"
        for value, who in ranks.items()
    )
