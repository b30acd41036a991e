"""Compare versions, configurations and environment variables of all ranks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distmp.config import RunConfig
from distmp.errors import SetupError, rank_names, ranks_by_value
from distmp.launcher.preflight.store import PreflightStore
from distmp.masking import masked
from distmp.utils import settings
from distmp.utils.environment_info import relevant, versions
from distmp.utils.settings.flat import digest, flat

# Variables that may differ between ranks.
_PER_RANK_VARIABLES = (
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
    """Identifies a rank, with what should be the same on all ranks.

    Attributes:
        host: Name of its machine.
        pid: Its process id.
        local_world_size: Number of ranks on its machine.
        versions: Versions of Python, distmp, torch, NCCL and so on.
        digest: Hash of its configuration.
        environment: The environment variables that change how a run behaves.
    """

    host: str
    pid: int
    local_world_size: int
    versions: Mapping[str, str | None]
    digest: str
    environment: Mapping[str, str]


def compare(store: PreflightStore, config: RunConfig) -> tuple[list[str], list[RankIdentity]]:
    """Compare ranks through the store; return warnings, and the identities of all ranks."""
    environment = store.environment
    values = flat(masked(settings.to_mapping(config)))
    own = RankIdentity(
        host=socket.gethostname(),
        pid=os.getpid(),
        local_world_size=environment.local_world_size,
        versions=versions(),
        digest=digest(values),
        environment=relevant(os.environ),
    )
    store.put(f"config/{store.rank}", values)
    store.put(f"identity/{store.rank}", asdict(own))
    if store.rank == 0:
        entries = [store.get(f"identity/{rank}") for rank in range(store.world_size)]
        identities = [RankIdentity(**entry) for entry in entries]
        problems = differences(identities, lambda rank: store.get(f"config/{rank}"))
        warnings = differing_variables(identities)
        store.put("result", [problems, warnings, entries])
    problems, warnings, entries = store.get("result")
    if problems:
        raise SetupError({0: "preflight: " + "; ".join(problems)}, exit_code=2)
    return warnings, [RankIdentity(**entry) for entry in entries]


def differences(
    identities: Sequence[RankIdentity], configuration: Callable[[int], Mapping[str, Any]]
) -> list[str]:
    """Describe versions and settings that differ between ranks, with ranks and machines.

    Args:
        identities: The identities of all ranks.
        configuration: Returns the settings of a rank by dotted name; called only if digests differ.
    """
    problems: list[str] = []
    for name in identities[0].versions:
        versions = [identity.versions.get(name) for identity in identities]
        problems += _difference(f"version of {name}", versions, identities)
    if len({identity.digest for identity in identities}) > 1:
        # One rank per digest is enough to name the settings.
        first = {identity.digest: rank for rank, identity in reversed([*enumerate(identities)])}
        configurations = {digest: configuration(rank) for digest, rank in first.items()}
        by_rank = [configurations[identity.digest] for identity in identities]
        for name in dict.fromkeys(name for values in configurations.values() for name in values):
            problems += _difference(name, [values.get(name) for values in by_rank], identities)
    return problems


def differing_variables(identities: Sequence[RankIdentity]) -> list[str]:
    """Describe environment variables that differ between ranks, but should probably not."""
    names = sorted({name for identity in identities for name in identity.environment})
    return [
        line
        for name in names
        if not name.startswith(_PER_RANK_VARIABLES)
        for line in _difference(
            name, [identity.environment.get(name) for identity in identities], identities
        )
    ]


def _difference(
    name: str, values: Sequence[Any], identities: Sequence[RankIdentity]
) -> Iterator[str]:
    texts = ["unset" if value is None else json.dumps(value) for value in values]
    by_value = ranks_by_value(dict(enumerate(texts)))
    if len(by_value) > 1:
        parts = []
        for value, ranks in by_value.items():
            hosts = sorted({identities[rank].host for rank in ranks})
            parts.append(f"{value} on {rank_names(ranks)} ({', '.join(hosts)})")
        yield f"{name} differs: {', '.join(parts)}"
