from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distmp.checkpoint import saving
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.errors import CheckpointError
from distmp.utils.flat_shard import FlatShard, gathered, global_shape, rectangles
from tests.checkpoint import listing
from tests.ranks import ranks, run_ranks


@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple),
    ends=st.tuples(st.integers(0, 700), st.integers(0, 700)),
)
def test_rectangles_cover_range_once_in_order(
    shape: tuple[int, ...], ends: tuple[int, int]
) -> None:
    size = math.prod(shape)
    start, stop = sorted(end % (size + 1) for end in ends)
    whole = torch.arange(size).view(shape)
    pieces: list[Tensor] = []
    for part in rectangles(shape, start, stop):
        region = tuple(
            slice(offset, offset + length)
            for offset, length in zip(part.offsets, part.sizes, strict=True)
        )
        piece = whole[region].reshape(-1)
        assert part.start == sum(len(before) for before in pieces)
        pieces.append(piece)
    found = torch.cat([torch.arange(0), *pieces])
    assert found.tolist() == list(range(start, stop))
    assert len(pieces) <= max(1, 2 * len(shape) - 1)


def test_operations_treat_slice_as_plain_tensor() -> None:
    values = torch.arange(6.0)
    part = FlatShard.of(values, torch.Size([4, 5]), 7)
    assert global_shape(part) == (4, 5)
    assert global_shape(values) == (6,)
    assert type(part + 1) is Tensor
    again = pickle.loads(pickle.dumps(part))
    assert (type(again), again.start, again.global_shape) == (FlatShard, 7, (4, 5))
    assert torch.equal(again + 0, values)
    part.copy_(torch.ones(6))
    assert values.tolist() == [1.0] * 6


SHAPES = {"matrix": (7, 5), "cube": (3, 4, 5), "vector": (11,), "one": (1,), "none": (0, 3)}


def whole(name: str) -> Tensor:
    return torch.arange(math.prod(SHAPES[name]), dtype=torch.float32).view(SHAPES[name]) + 0.5


def part_of(name: str, values: Tensor) -> Tensor:
    """Return this rank's range of elements; one rank has none of the smallest tensor."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    size = values.numel()
    start, stop = rank * size // world_size, (rank + 1) * size // world_size
    return FlatShard.of(values.reshape(-1)[start:stop].clone(), values.shape, start)


def save(directory: Path) -> None:
    saving.save(directory, 1, {name: part_of(name, whole(name)) for name in SHAPES}, {}, keep=1)


def load(path: Path, *, as_slices: bool) -> None:
    found = {
        name: part_of(name, torch.zeros(shape)) if as_slices else torch.zeros(shape)
        for name, shape in SHAPES.items()
    }
    StoredCheckpoint(path).load(found)
    for name, tensor in found.items():
        expected = part_of(name, whole(name)) if as_slices else whole(name)
        assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(expected))


def test_copied_slice_keeps_its_position() -> None:
    slice_ = FlatShard.of(torch.arange(4.0), torch.Size([3, 2]), 1)
    state = copy.deepcopy({"first": slice_, "again": slice_})
    assert state["first"] is state["again"]
    copied = state["first"]
    assert isinstance(copied, FlatShard)
    assert (copied.global_shape, copied.start) == (slice_.global_shape, slice_.start)
    copied.zero_()
    assert slice_.tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_slices_load_at_other_world_sizes(tmp_path: Path) -> None:
    for world_size in (1, 2, 4):
        directory = tmp_path / str(world_size)
        if world_size == 1:
            save(directory)
        else:
            run_ranks(save, world_size, directory)
        checkpoint = listing.latest(directory)
        assert checkpoint is not None
        assert StoredCheckpoint(checkpoint).tensors["cube"] == ((3, 4, 5), torch.float32)
        load(checkpoint, as_slices=False)
        load(checkpoint, as_slices=True)
        for other in {2, 4} - {world_size}:
            run_ranks(_load_slices, other, checkpoint)


def _load_slices(path: Path) -> None:
    load(path, as_slices=True)


def test_slice_of_other_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    checkpoint = listing.latest(tmp_path)
    assert checkpoint is not None
    wrong = FlatShard.of(torch.zeros(35), torch.Size([5, 7]), 0)
    with pytest.raises(CheckpointError, match=r"'matrix' has shape \[7, 5\] in it, not \[5, 7\]"):
        StoredCheckpoint(checkpoint).load({"matrix": wrong})


@ranks(2)
def test_gather_keeps_every_bit() -> None:
    values = torch.tensor([[-0.0, 1.0, 1e-45], [math.nan, -math.inf, -0.0]])
    start, stop = [(0, 2), (2, 6)][dist.get_rank()]
    full = gathered(FlatShard.of(values.flatten()[start:stop].clone(), values.shape, start))
    assert torch.equal(full.view(torch.int32), values.view(torch.int32))
