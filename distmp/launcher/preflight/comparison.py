"""Whether all ranks run the same: versions, configuration, variables of the environment."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distmp.config import RunConfig
from distmp.errors import SetupError
from distmp.launcher.preflight.store import PreflightStore, rank_names
from distmp.utils import settings
from distmp.utils.environment_info import relevant, versions
from distmp.utils.settings.flat import digest, flat

# Variables that are meant to differ from rank to rank.
_OWN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "CUDA_VISIBLE_DEVICES",
    "PET_",
    "MASTER_",
    "TORCHELASTIC_",
    "TORCHINDUCTOR_CACHE_DIR",
)


@dataclass(frozen=True)
class RankIdentity:
    """Who a rank is, and what it ought to have in common with the others.

    Attributes:
        host: Name of its machine.
        pid: Its process.
        local_world_size: Ranks of its machine.
        versions: Of what computes and talks.
        digest: Of its configuration.
        environment: The variables that change how a run behaves.
    """

    host: str
    pid: int
    local_world_size: int
    versions: Mapping[str, str | None]
    digest: str
    environment: Mapping[str, str]


def compare(meeting: PreflightStore, config: RunConfig) -> tuple[list[str], list[RankIdentity]]:
    """Compare ranks through the store; return oddities, and who the ranks are."""
    environment = meeting.environment
    values = flat(settings.to_mapping(config))
    mine = RankIdentity(
        host=socket.gethostname(),
        pid=os.getpid(),
        local_world_size=environment.local_world_size,
        versions=versions(),
        digest=digest(values),
        environment=relevant(os.environ),
    )
    meeting.put(f"config/{meeting.rank}", values)
    meeting.put(f"identity/{meeting.rank}", asdict(mine))
    if meeting.rank == 0:
        entries = [meeting.get(f"identity/{rank}") for rank in range(meeting.world_size)]
        identities = [RankIdentity(**entry) for entry in entries]
        problems = differences(identities, lambda rank: meeting.get(f"config/{rank}"))
        warnings = odd_variables(identities)
        meeting.put("result", [problems, warnings, entries])
    problems, warnings, entries = meeting.get("result")
    if problems:
        raise SetupError({0: "preflight: " + "; ".join(problems)}, exit_code=2)
    return warnings, [RankIdentity(**entry) for entry in entries]


def differences(
    identities: Sequence[RankIdentity], configuration: Callable[[int], Mapping[str, Any]]
) -> list[str]:
    """Name what is not the same on all ranks: versions and settings, by rank and machine.

    Args:
        identities: Of all ranks.
        configuration: Returns the settings of a rank by dotted name; only asked if digests differ.
    """
    problems: list[str] = []
    for name in identities[0].versions:
        problems += _disagreement(
            f"version of {name}", [who.versions.get(name) for who in identities], identities
        )
    if len({who.digest for who in identities}) > 1:
        # One rank of each kind is enough to name the settings.
        first = {who.digest: rank for rank, who in reversed([*enumerate(identities)])}
        configurations = {digest: configuration(rank) for digest, rank in first.items()}
        of_rank = [configurations[who.digest] for who in identities]
        for name in dict.fromkeys(name for values in configurations.values() for name in values):
            problems += _disagreement(name, [values.get(name) for values in of_rank], identities)
    return problems


def odd_variables(identities: Sequence[RankIdentity]) -> list[str]:
    """Name environment variables that are not the same on all ranks, and should probably be."""
    names = sorted({name for who in identities for name in who.environment})
    return [
        told
        for name in names
        if not name.startswith(_OWN_VARIABLES)
        for told in _disagreement(
            name, [who.environment.get(name) for who in identities], identities
        )
    ]


def _disagreement(
    name: str, values: Sequence[Any], identities: Sequence[RankIdentity]
) -> Iterator[str]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault("unset" if value is None else json.dumps(value), []).append(rank)
    if len(ranks) > 1:
        told = [
            f"{value} on {rank_names(who)} ({', '.join(sorted({identities[r].host for r in who}))})"
            for value, who in ranks.items()
        ]
        yield f"{name} differs: {', '.join(told)}"
