"""Preflight: check before training that ranks are consistent, and connected by fast links.

Ranks first compare versions, settings, code and data through the launcher's store. They then
create the process group as for training, and exchange data, to report slow links. The watchdog
reports a rank that blocks the others.

    torchrun ... -m distmp.train --config FILE --preflight only      # only the preflight
"""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distmp.checkpoint.storage import locate
from distmp.config import RunConfig
from distmp.distributed import rendezvous_store
from distmp.distributed.comparison import differences
from distmp.distributed.progress import current_phase
from distmp.distributed.rank_environment import RankEnvironment
from distmp.distributed.rendezvous_store import PrefixStore, Store
from distmp.distributed.world import World, join
from distmp.errors import LISTED, ConfigError, SetupError, keys_by_value, rank_names
from distmp.training.run_inputs import CODE, DATA, ENVIRONMENT, inputs
from distmp.utils.processes import holds_within
from distmp.utils.settings import digest, value_text
from distmp.utils.units import bytes_text, counted

# A network file system may show a new file late.
_APPEARS_SECONDS = 5.0


class _Ranks(NamedTuple):
    """The ranks before a process group exists.

    Attributes:
        store: A store that only the preflight of this start uses.
        rank: This rank.
        world_size: Number of ranks.
    """

    store: Store
    rank: int
    world_size: int

    def gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all ranks; `name` must not have been used before."""
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        self.store.set(keys[self.rank], json.dumps(value))
        self.store.wait(keys)
        return [json.loads(text) for text in self.store.multi_get(keys)]


def is_enabled(config: RunConfig, environment: RankEnvironment) -> bool:
    """Whether a run starts with a preflight; "auto" runs it on more than one machine."""
    if config.preflight == "auto":
        return environment.world_size > environment.local_world_size
    if config.preflight == "only" and environment.world_size == 1:
        raise ConfigError("preflight", "only", "use two or more; `distmp doctor` checks a machine")
    return config.preflight != "never" and environment.world_size > 1


def join_checked(
    config: RunConfig, environment: RankEnvironment, watch: Callable[[], object]
) -> tuple[World, list[str]]:
    """Create the process group like `join`, with a preflight; every rank must call it.

    It takes a few seconds without problems.

    Args:
        config: The configuration of the run.
        environment: Rank and world size of this process.
        watch: Starts a watchdog of the preflight; called when all ranks have started.

    Returns:
        The process group, and the report, the same on every rank: a line with the measured speeds,
        and one for each slow rank or differing variable.

    Raises:
        AttemptError: If this rank does not reach the store, or some ranks did not start.
        SetupError: On every rank, if versions, settings, code or data differ, or if machines do not
            share the directory of the checkpoints; names ranks, and settings or files.
    """
    started = time.monotonic()
    timeout_seconds = 60 * config.timeout_minutes
    store = PrefixStore("preflight", rendezvous_store.for_this_start(timeout_seconds))
    watch()
    current_phase.enter("preflight: comparing settings, code and data", transfers=True)
    ranks = _Ranks(store, environment.rank, environment.world_size)
    warnings, hosts = _compare(ranks, config, environment)
    current_phase.enter("preflight: connecting to the other ranks")
    world = join(environment, timeout_seconds=timeout_seconds)
    current_phase.enter("preflight: exchanging data with its neighbors")
    local_sizes = world.ranks.gather(environment.local_world_size)
    speeds = world.ranks.gather(measure(world, stride(local_sizes)))
    names = [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
    summary = _summary(speeds, hosts, time.monotonic() - started)
    return world, [summary, *warnings, *slow_ranks(speeds, names)]


def _summary(speeds: Sequence[RankSpeed], hosts: Sequence[str], seconds: float) -> str:
    links = [speed.link for speed in speeds if speed.link]
    parts = [
        f"{len(speeds)} ranks on {counted(len({*hosts}), 'host')}, consistent",
        f"all-reduce {bytes_text(min(speed.all_reduce for speed in speeds))}/s",
    ]
    if links:
        parts.append(f"links {bytes_text(min(links))}/s to {bytes_text(max(links))}/s")
    return f"{'; '.join(parts)}; {seconds:.1f} s"


def _compare(
    ranks: _Ranks, config: RunConfig, environment: RankEnvironment
) -> tuple[list[str], list[str]]:
    """Compare ranks; return warnings, and the name of the machine of each rank.

    Raises:
        SetupError: On every rank, if they differ or do not share the directory of the checkpoints.
    """
    own = inputs(config, with_files=environment.local_rank == 0)
    hosts = ranks.gather("host", socket.gethostname())
    problems: list[str] = []
    warnings: list[str] = []
    for kind, values in _differing(ranks, own):
        found = _differences(values, hosts)
        if kind == ENVIRONMENT:
            warnings += found
        elif kind in (CODE, DATA):
            problems.append(_differing_files(kind, found))
        else:
            problems += found
    if without := _ranks_without_directory(ranks, config):
        problems.append(_not_shared(config, without, hosts))
    if problems:
        raise SetupError({0: "preflight: " + "; ".join(problems)}, exit_code=2)
    return warnings, hosts


def _differing(
    ranks: _Ranks, own: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, dict[int, Mapping[str, Any]]]]:
    """Yield the kinds of inputs that differ, with the values of each rank that has them.

    Digests are compared first. For each digest, one rank publishes its values.
    """
    digests = ranks.gather("digests", {kind: digest(values) for kind, values in own.items()})
    for kind in digests[0]:
        with_kind = {rank: every[kind] for rank, every in enumerate(digests) if kind in every}
        groups = [*keys_by_value(with_kind).values()]
        if len(groups) > 1:
            publishes = ranks.rank in [group[0] for group in groups]
            published = ranks.gather(kind, own[kind] if publishes else None)
            yield kind, {rank: published[group[0]] for group in groups for rank in group}


def _differences(values: Mapping[int, Mapping[str, Any]], hosts: Sequence[str]) -> list[str]:
    """Return a line for each name whose value is not the same on all ranks."""
    texts = {
        rank: {name: "unset" if value is None else value_text(value) for name, value in own.items()}
        for rank, own in values.items()
    }
    lines = []
    for name, by_value in differences(texts, absent="unset"):
        parts = [f"{value} on {_on_hosts(ranks, hosts)}" for value, ranks in by_value.items()]
        lines.append(f"{name} differs: {', '.join(parts)}")
    return lines


def _on_hosts(ranks: Collection[int], hosts: Sequence[str]) -> str:
    return f"{rank_names(ranks)} ({', '.join(sorted({hosts[rank] for rank in ranks}))})"


def _differing_files(kind: str, lines: Sequence[str]) -> str:
    more = f" and {len(lines) - LISTED:,} more files" if len(lines) > LISTED else ""
    return (
        f"the files of the {kind} differ: {'; '.join(lines[:LISTED])}{more}. Copy the same files "
        "to all machines, or use shared storage"
    )


def _ranks_without_directory(ranks: _Ranks, config: RunConfig) -> list[int]:
    """Return the ranks that do not see a file that rank 0 writes beside the checkpoints.

    Every rank writes its part of a checkpoint, so all machines need the same directory. The other
    files of a run are written and read by one rank each.
    """
    with ExitStack() as until_seen:
        name = None
        directory = _checkpoint_directory(config)
        # The run reports a directory that cannot be written when it creates its own.
        with suppress(OSError):
            if ranks.rank == 0 and directory is not None:
                name = until_seen.enter_context(
                    tempfile.NamedTemporaryFile(dir=directory, prefix=".distmp-preflight-")
                ).name
        name = ranks.gather("file", name)[0]
        is_seen = name is None or holds_within(Path(name).exists, _APPEARS_SECONDS)
        seen = ranks.gather("seen", is_seen)
    return [rank for rank in range(ranks.world_size) if not seen[rank]]


def _checkpoint_directory(config: RunConfig) -> Path | None:
    """Return the nearest existing directory above the checkpoints."""
    path = Path(config.run_dir)
    if config.checkpoint.path is not None:
        path = locate("checkpoint.path", config.checkpoint.path)
    path = path.absolute()
    return next((parent for parent in (path, *path.parents) if parent.is_dir()), None)


def _not_shared(config: RunConfig, ranks: Collection[int], hosts: Sequence[str]) -> str:
    setting = "run_dir" if config.checkpoint.path is None else "checkpoint.path"
    value = config.checkpoint.path or config.run_dir
    return (
        f"{setting} = {value!r} is not the same directory on all machines: "
        f"{_on_hosts(ranks, hosts)} cannot see what rank 0 ({hosts[0]}) writes there, so no "
        "checkpoint could be written; set run_dir or checkpoint.path to a directory on shared "
        "storage"
    )


# A rank is reported if its link is slower than the median of the others by this factor.
SLOW_LINK = 2.0

# A slow link carries these messages in a few seconds.
_MESSAGE_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
_REPETITIONS = 3


class RankSpeed(NamedTuple):
    """Measured speeds of a rank.

    Attributes:
        link: Bytes per second of an exchange with the faster of its two neighbors; 0.0 without one.
        all_reduce: Bytes per second of an all-reduce over all ranks.
    """

    link: float
    all_reduce: float


def measure(world: World, stride: int) -> RankSpeed:
    """Measure the links of this rank; every rank calls it."""
    # Gloo, which ranks that share a GPU use, cannot send tensors of a GPU.
    device = torch.device("cpu") if world.backend == "gloo" else world.device
    rates = [
        _rate(partial(_exchange, partner=partner), device)
        for partner in partners(world.rank, world.world_size, stride)
        if partner is not None
    ]
    return RankSpeed(max(rates, default=0.0), _rate(dist.all_reduce, device))


def _rate(send: Callable[[Tensor], object], device: torch.device) -> float:
    """Return the bytes per second of the fastest of several messages."""
    send(torch.zeros(1, device=device))  # opens connections
    size = _MESSAGE_BYTES[device.type]
    message = torch.ones(size // 4, device=device)
    return size / min(_time(partial(send, message), device) for _ in range(_REPETITIONS))


def stride(local_sizes: Sequence[int]) -> int:
    """Return the distance between ranks that exchange data, so that they are on different machines.

    Args:
        local_sizes: For each rank, the number of ranks on its machine.
    """
    uniform = len(set(local_sizes)) == 1 and len(local_sizes) % local_sizes[0] == 0
    return local_sizes[0] if uniform and local_sizes[0] < len(local_sizes) else 1


def partners(rank: int, world_size: int, stride: int) -> list[int | None]:
    """Return a rank's partner in each round, or None if it is idle in that round.

    Ranks that are `stride` apart form a ring in which each exchanges data with both neighbors: a
    rank that is slow with both is slow itself.
    """
    count = world_size // stride
    position, lane = divmod(rank, stride)
    pairs = [(a, (a + 1) % count) for a in range(count if count > 2 else count - 1)]
    # The last pair of an odd ring shares a rank with the first.
    even = count - count % 2
    rounds = filter(None, (pairs[:even:2], pairs[1:even:2], pairs[even:]))
    other = [{a: b for pair in own for a, b in (pair, pair[::-1])} for own in rounds]
    return [own[position] * stride + lane if position in own else None for own in other]


def _exchange(sent: Tensor, partner: int) -> None:
    """Send a tensor to a partner and receive one from it."""
    operations = [
        dist.P2POp(dist.isend, sent, partner),
        dist.P2POp(dist.irecv, torch.empty_like(sent), partner),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _time(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def slow_ranks(speeds: Sequence[RankSpeed], names: Sequence[str]) -> list[str]:
    """Return a line for each rank whose link is far slower than the median of the others.

    Args:
        speeds: Measured speeds of all ranks.
        names: Names of all ranks.
    """
    lines = []
    for rank, speed in enumerate(speeds):
        others = [other.link for other in (*speeds[:rank], *speeds[rank + 1 :]) if other.link]
        rate = statistics.median(others or [0.0])
        if speed.link and rate > SLOW_LINK * speed.link:
            lines.append(
                f"{names[rank]} is slow: an exchange of data runs at {bytes_text(speed.link)}/s, "
                f"{rate / speed.link:.1f} x slower than the median of the others"
            )
    return lines
