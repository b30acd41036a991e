"""Which parameter stands where in which flat bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Every parameter starts on a 64-byte boundary, so that vectorised kernels need no special case.
ALIGNMENT = 16
DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of one bucket and their places in its flat buffer.

    Attributes:
        names: Names of the parameters in the model.
        parameters: The parameters, all of one dtype and on one device.
        offsets: First element of each parameter in the flat buffer.
        size: Elements of the flat buffer, padding included.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    offsets: tuple[int, ...]
    size: int

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return one view of `flat`, shape (size,), per parameter, in its shape and memory order.

        A gradient in another order than its parameter (channels_last, for one) would be stepped
        wrongly by torch's fused optimizers on CPU, which read both as flat memory.
        """
        return [
            flat.as_strided(parameter.shape, _dense_strides(parameter), offset)
            for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]


def plan_buckets(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> list[BucketLayout]:
    """Divide parameters into buckets in reverse order of registration.

    Backward produces gradients roughly in that order, so the first bucket is full early and its
    reduction runs while backward goes on. A parameter that is registered twice stands in one
    place, under its first name.

    Args:
        named_parameters: Names and parameters, in order of registration.
        bucket_bytes: A bucket is closed once its FP32 buffer has this many bytes.
    """
    unique: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in named_parameters:
        unique.setdefault(id(parameter), (name, parameter))
    by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in reversed(unique.values()):
        by_kind.setdefault((parameter.device, parameter.dtype), []).append((name, parameter))
    return [
        _layout(run)
        for entries in by_kind.values()
        for run in _cut_into_runs(entries, bucket_bytes)
    ]


def _cut_into_runs(
    entries: Sequence[tuple[str, nn.Parameter]], bucket_bytes: int
) -> list[list[tuple[str, nn.Parameter]]]:
    runs: list[list[tuple[str, nn.Parameter]]] = [[]]
    filled = 0
    for entry in entries:
        if filled >= bucket_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(entry)
        filled += entry[1].numel() * torch.float32.itemsize
    return runs


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    return torch.empty_like(parameter, device="meta").stride()


def _layout(run: Sequence[tuple[str, nn.Parameter]]) -> BucketLayout:
    offsets, end = [], 0
    for _, parameter in run:
        offsets.append(end)
        end += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
    names, parameters = zip(*run, strict=True)
    return BucketLayout(names, parameters, tuple(offsets), end)
