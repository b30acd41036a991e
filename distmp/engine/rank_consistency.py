"""Compares the bits of values that ranks should have in common.

Replicated training stays equal by induction: equal weights, equal reduced gradients, equal updates.
Faulty memory, a library that is not deterministic or a change that only one rank made end that
without a sign. Every tensor gets a digest on its own device, all digests together one, and one
collective of two integers tells whether the ranks agree; only if they do not, more is exchanged.

A digest sees every bit: one flipped bit changes it for certain, any other change with a probability
of 1 - 2^-31 or better. It does not depend on the kind of device, on strides or on the number of
threads.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from distmp.errors import ConfigError, TrainingError
from distmp.utils.flat_shard import FlatShard

if TYPE_CHECKING:
    from distmp.distributed.world import World

# Words of one row sum. Part of the definition of a digest, so the same on every device.
ROW = 16384
# Rows taken at once, which does not change the digest: on a CPU what fits into its cache.
ROWS_AT_ONCE = {"cpu": 4}
ROWS_AT_ONCE_ELSEWHERE = 256
# The words as which a tensor is read, by its bytes per element; all wider ones by four bytes.
WORDS = {1: torch.uint8, 2: torch.int16}

# Of splitmix64 (Steele, Lea and Flood 2014), as signed integers.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
SHIFTS = (30, 27, 31)

logger = logging.getLogger("distmp")


@dataclass(frozen=True)
class RankConsistencyConfig:
    """When ranks compare what they should have in common."""

    every: int = 0
    """Steps between two comparisons of weights, optimizer state and loss scale; 0: never."""

    on_difference: Literal["stop", "repair"] = "stop"
    """Stop the run, or go on with the values of rank 0."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError("rank_consistency.every", self.every, "use 0 or more steps")
        if self.on_difference not in ("stop", "repair"):
            raise ConfigError(
                "rank_consistency.on_difference", self.on_difference, "use stop or repair"
            )


class Trained(Protocol):
    """What the guard needs of an engine; `distmp.Engine` is one."""

    module: nn.Module
    world: World

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live state as `distmp.Engine.state_dict` does."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state with the names of `state_dict`."""


class Difference(NamedTuple):
    """Where ranks differ.

    Attributes:
        name: The first tensor that differs.
        deviating: Ranks whose values are not those of most ranks (of rank 0 where there is no
            majority).
        others: The ranks that have those values.
        differing: How many tensors differ between some ranks.
        compared: How many tensors were compared.
        repairable: Whether all ranks have the same tensors, with other values.
    """

    name: str
    deviating: tuple[int, ...]
    others: tuple[int, ...]
    differing: int
    compared: int
    repairable: bool

    def __str__(self) -> str:
        return (
            f"{_in_words(self.name)} of {_ranks(self.deviating)} differs from that of "
            f"{_ranks(self.others)} ({self.differing} of {self.compared} tensors differ)"
        )


def check(trained: Trained, on_difference: Literal["stop", "repair"] = "stop") -> Difference | None:
    """Compare what the ranks of an engine have in common; every rank has to call it.

    Compared are weights, 16-bit parameters, optimizer state, loss scale and step counts. Left out
    is what differs by design: shards, and buffers, which follow each rank's own samples. The host
    waits for the device.

    Args:
        trained: An engine, between two steps.
        on_difference: "stop" raises; "repair" takes over rank 0's values and says so in the log.

    Returns:
        The difference that was repaired, or None.

    Raises:
        TrainingError: On every rank, for a difference that is not to be or cannot be repaired.
    """
    world = trained.world
    if world.group is None:
        return None
    state = trained.state_dict()
    tensors = _in_common(trained.module, state)
    difference = compare(tensors, world.group, world.device)
    if difference is None:
        return None
    if on_difference == "stop" or not difference.repairable:
        raise TrainingError(_advice(difference))
    broadcast(tensors, world.group, world.device)
    # Also what an engine derives from its state, such as parameters in 16 bits.
    trained.load_state_dict(state)
    if world.rank == 0:
        logger.error("ranks were out of step: %s; all ranks go on as rank 0", difference)
    return difference


def compare(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device
) -> Difference | None:
    """Return where the ranks of a group differ, or None; every rank has to call it.

    Args:
        tensors: What every rank should have with the same bits. Names, shapes and dtypes are
            compared too, so ranks may come with different tensors.
        group: The ranks.
        device: Where the group's collectives run.
    """
    found = digests(tensors, device)
    kinds = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    keys = torch.tensor([_key(kind) for kind in kinds], dtype=torch.int64, device=device)
    total = _mix(found + keys).sum()
    # ~ reverses the order of all integers, so that one maximum gives the smallest total as well.
    extremes = torch.stack([total, ~total])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    largest, smallest_reversed = extremes.tolist()
    if largest == ~smallest_reversed:
        return None
    mine = {
        name: (kind, digest)
        for name, kind, digest in zip(tensors, kinds, found.tolist(), strict=True)
    }
    contents: list[dict[str, tuple[str, int]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(contents, mine, group)
    return _locate(contents, dist.get_process_group_ranks(group))


@torch.no_grad()
def broadcast(
    tensors: Mapping[str, Tensor], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Overwrite tensors, in place, with those of the group's first rank.

    Args:
        tensors: The same names, shapes and dtypes on every rank.
        group: The ranks; all have to call it.
        device: Where the group's collectives run.
    """
    source = dist.get_global_rank(group, 0)
    for tensor in tensors.values():
        sent = tensor.to(device).contiguous()
        dist.broadcast(sent, source, group)
        tensor.copy_(sent)


def digests(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return a digest of the bits of each tensor, int64 of shape (len(tensors),), on `device`.

    Equal bits in the same logical order give equal digests, whatever the strides and device.
    """
    sums = [_row_sums(tensor.detach()).to(device, non_blocking=True) for tensor in tensors.values()]
    counts = [len(rows) for rows in sums]
    # Two integers for each row: which tensor it is of, and its number there.
    places = [[index, row] for index, count in enumerate(counts) for row in range(count)]
    owners, rows = torch.tensor(places, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    mixed = _mix(torch.cat([empty, *sums]) + rows * GOLDEN)
    return torch.zeros(len(counts), dtype=torch.int64, device=device).index_add_(0, owners, mixed)


def _row_sums(tensor: Tensor) -> Tensor:
    """Return the sum of the words of each row, each word times the odd weight of its column."""
    words = tensor.reshape(-1).view(WORDS.get(tensor.element_size(), torch.int32))
    weights = _weights(tensor.device)
    most_rows = ROWS_AT_ONCE.get(tensor.device.type, ROWS_AT_ONCE_ELSEWHERE)
    room = torch.empty(
        min(most_rows, -(-len(words) // ROW)) * ROW, dtype=torch.int64, device=tensor.device
    )
    sums = []
    for piece in words.split(max(1, len(room))):
        block = room[: -(-len(piece) // ROW) * ROW]
        block[: len(piece)].copy_(piece)
        block[len(piece) :].zero_()
        sums.append(block.view(-1, ROW).mul_(weights).sum(1))
    return torch.cat(sums)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return the weight of each column, int64 of shape (ROW,)."""
    columns = torch.arange(1, ROW + 1, dtype=torch.int64, device=device)
    return _mix(columns * GOLDEN) | 1


def _mix(values: Tensor) -> Tensor:
    """Return other int64 numbers for different numbers, spread over all bits (splitmix64)."""
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        # >> copies the sign bit, which does not belong there.
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * multiplier
    return values


def _key(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _in_common(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the local tensors that should be equal on all ranks."""
    buffers = {f"model/{name}" for name, _ in module.named_buffers(remove_duplicate=False)}
    entries = {name: tensor for name, tensor in state.items() if name not in buffers}
    for name, parameter in module.named_parameters():
        entries[f"module/{name}"] = parameter.detach()
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, torch.dtype]] = set()
    for name, tensor in entries.items():
        local = _local(tensor)
        if local is None:
            continue
        # Without 16-bit parameters those of the module are the weights themselves.
        memory = (local.data_ptr(), local.dtype)
        if local.numel() and memory in seen:
            continue
        seen.add(memory)
        found[name] = local
    return found


def _local(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor that every rank holds whole, None for a shard of one."""
    if isinstance(tensor, FlatShard):
        return None
    if not is_traceable_wrapper_subclass(tensor):
        return tensor
    # Only where there are such tensors: importing this takes half a second.
    from torch.distributed.tensor import DTensor

    if isinstance(tensor, DTensor) and all(part.is_replicate() for part in tensor.placements):
        return tensor.to_local()
    return None


def _locate(contents: Sequence[Mapping[str, tuple[str, int]]], ranks: Sequence[int]) -> Difference:
    """Find the first name under which some ranks have something else than the others."""
    names = list(dict.fromkeys(name for content in contents for name in content))
    versions = {name: [content.get(name) for content in contents] for name in names}
    differing = [name for name in names if len(set(versions[name])) > 1]
    first = versions[differing[0]]
    # Of equally frequent ones the counter returns the one that it met first: that of rank 0.
    usual, _ = Counter(first).most_common(1)[0]
    kinds = [{name: kind for name, (kind, _) in content.items()} for content in contents]
    return Difference(
        name=differing[0],
        deviating=tuple(rank for rank, one in zip(ranks, first, strict=True) if one != usual),
        others=tuple(rank for rank, one in zip(ranks, first, strict=True) if one == usual),
        differing=len(differing),
        compared=len(names),
        repairable=all(kind == kinds[0] for kind in kinds),
    )


def _in_words(name: str) -> str:
    section, _, rest = name.partition("/")
    if section == "loss_scale":
        return "the loss scale" if rest == "value" else f"the loss scale's {rest}"
    titles = {
        "model": "parameter",
        "module": "16-bit parameter",
        "optimizer": "optimizer state",
        "engine": "the engine's",
    }
    return f"{titles[section]} {rest!r}" if section in titles else repr(name)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _advice(difference: Difference) -> str:
    message = f"ranks are out of step: {difference}; "
    if not difference.repairable:
        return message + "they do not even have the same tensors: give every rank the same model"
    return message + (
        "continue from a checkpoint with --resume, and suspect that machine if it "
        "happens again; rank_consistency.on_difference = repair goes on with the values of rank 0"
    )
