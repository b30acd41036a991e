"""Converts first moments between FP8 and other dtypes when a state is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from distmp.errors import CheckpointError
from distmp.optim.moments import CODES, Place, block_size, dequantize, quantize, zero_scales
from distmp.utils.dtensor import local_values

KEYS = MOMENT, SCALES = "exp_avg", "exp_avg_scale"


class ConvertedMoment(NamedTuple):
    """A first moment that has scales in a stored state or in the optimizer, but not in both.

    Attributes:
        loaded: Temporary tensors in the stored format, to load into, by key.
        live: Tensors of the optimizer, by key.
        block: Number of elements that share a scale.
    """

    loaded: dict[str, Tensor]
    live: dict[str, Tensor]
    block: int

    def finish(self) -> None:
        """Write the loaded moment into the optimizer."""
        loaded, live = _flat(self.loaded), _flat(self.live)
        values = loaded[MOMENT].float()
        if SCALES in loaded:
            values = dequantize(loaded[MOMENT], loaded[SCALES], self.block)
        if SCALES not in live:
            live[MOMENT].copy_(values)
            return
        codes, scales = quantize(values, self.block)
        live[MOMENT].copy_(codes)
        live[SCALES].copy_(scales)


def convert_moment(
    name: str, state: Mapping[str, Tensor], stored: Mapping[str, torch.dtype], weight: Tensor
) -> ConvertedMoment | None:
    """Return the conversion of a parameter's first moment, or None if it needs none.

    Args:
        name: Name of the parameter.
        state: The live state of the parameter, by key.
        stored: Dtype of each stored state of the parameter, by key.
        weight: The weight in the form in which it is stored: plain, a DTensor or a `FlatShard`.

    Raises:
        CheckpointError: If a shard divides a block.
    """
    if MOMENT not in state or MOMENT not in stored or (SCALES in state) == (SCALES in stored):
        return None
    place = Place.of(weight)
    block = block_size(place.shape)
    if block is None or place.start % block or local_values(weight).numel() % block:
        raise CheckpointError(
            f"the first moment of {name!r} is FP8 in the state, and this engine divides its blocks "
            "over ranks; load it with another strategy, such as fsdp"
        )
    dtype = CODES if SCALES in stored else stored[MOMENT]
    loaded = {MOMENT: torch.zeros_like(state[MOMENT], dtype=dtype)}
    if SCALES in stored:
        loaded[SCALES] = zero_scales(state[MOMENT], place, block)
    live = {key: state[key] for key in (MOMENT, SCALES) if key in state}
    return ConvertedMoment(loaded, live, block)


def _flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        key: local_values(tensor).as_subclass(Tensor).view(-1) for key, tensor in tensors.items()
    }
