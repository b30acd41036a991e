"""Compare versions, settings, code, data and environment variables of all ranks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distmp.config import RunConfig
from distmp.errors import LISTED, SetupError, rank_names, ranks_by_value
from distmp.launcher.preflight.inputs import CODE, SETTINGS, inputs
from distmp.launcher.preflight.shared_folder import not_shared, ranks_without_folder
from distmp.launcher.preflight.store import PreflightStore
from distmp.utils.environment_info import relevant, versions
from distmp.utils.settings.flat import digest

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
    "DISTMP_STORE",
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
        digests: Hashes of its settings and, on the first rank of a machine, of its code and data.
        environment: The environment variables that change how a run behaves.
    """

    host: str
    pid: int
    local_world_size: int
    versions: Mapping[str, str | None]
    digests: Mapping[str, str]
    environment: Mapping[str, str]


def compare(store: PreflightStore, config: RunConfig) -> tuple[list[str], list[RankIdentity]]:
    """Compare ranks through the store; return warnings, and the identities of all ranks.

    Raises:
        SetupError: On every rank, if they differ or do not share the folder of the checkpoints.
    """
    environment = store.environment
    own_inputs = inputs(config, with_files=environment.local_rank == 0)
    own = RankIdentity(
        host=socket.gethostname(),
        pid=os.getpid(),
        local_world_size=environment.local_world_size,
        versions=versions(),
        digests={kind: digest(values) for kind, values in own_inputs.items()},
        environment=relevant(os.environ),
    )
    store.put(f"identity/{store.rank}", asdict(own))
    if store.rank == 0:
        store.put("identities", [store.get(f"identity/{rank}") for rank in range(store.world_size)])
    identities = [RankIdentity(**entry) for entry in store.get("identities")]
    for kind, values in own_inputs.items():
        if store.rank in one_per_digest(identities, kind):
            store.put(f"{kind}/{store.rank}", values)
    without = ranks_without_folder(store, config, [*_digests(identities, CODE)])
    if store.rank == 0:
        problems = differences(identities, lambda kind, rank: store.get(f"{kind}/{rank}"))
        if without:
            problems.append(not_shared(config, _on_hosts(without, identities), identities[0].host))
        store.put("result", [problems, differing_variables(identities)])
    problems, warnings = store.get("result")
    if problems:
        raise SetupError({0: "preflight: " + "; ".join(problems)}, exit_code=2)
    return warnings, identities


def differences(
    identities: Sequence[RankIdentity], inputs_of: Callable[[str, int], Mapping[str, Any]]
) -> list[str]:
    """Describe what differs between ranks, with ranks and machines: versions, settings, files.

    Args:
        identities: The identities of all ranks.
        inputs_of: Returns the values of a kind of inputs on a rank, see `inputs`; called only if
            the digests of that kind differ.
    """
    problems: list[str] = []
    for name in identities[0].versions:
        versions = dict(enumerate(identity.versions.get(name) for identity in identities))
        problems += _difference(f"version of {name}", versions, identities)
    for kind in identities[0].digests:
        published = {rank: inputs_of(kind, rank) for rank in one_per_digest(identities, kind)}
        digests = _digests(identities, kind)
        rank_of = {digests[rank]: rank for rank in published}
        values = {rank: published[rank_of[value]] for rank, value in digests.items() if published}
        if kind == SETTINGS:
            for name in _differing(values):
                by_rank = {rank: settings.get(name) for rank, settings in values.items()}
                problems += _difference(name, by_rank, identities)
        elif published:
            problems.append(_differing_files(kind, values, identities))
    return problems


def one_per_digest(identities: Sequence[RankIdentity], kind: str) -> list[int]:
    """Return the first rank with each digest of a kind; none if all digests are equal."""
    by_digest = ranks_by_value(_digests(identities, kind))
    return [ranks[0] for ranks in by_digest.values()] if len(by_digest) > 1 else []


def _digests(identities: Sequence[RankIdentity], kind: str) -> dict[int, str]:
    """Return the digests of the ranks that have one."""
    return {
        rank: identity.digests[kind]
        for rank, identity in enumerate(identities)
        if kind in identity.digests
    }


def _differing(values: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not the same on all ranks."""
    first, *others = {id(own): own for own in values.values()}.values() or [{}]
    names = dict.fromkeys(name for own in (first, *others) for name in own)
    return [name for name in names if any(own.get(name) != first.get(name) for own in others)]


def _differing_files(
    kind: str,
    values: Mapping[int, Mapping[str, str]],
    identities: Sequence[RankIdentity],
) -> str:
    names = _differing(values)
    parts = []
    for name in names[:LISTED]:
        by_rank = {rank: own.get(name, "missing") for rank, own in values.items()}
        # The digest follows the size.
        sizes = {rank: text.partition(" bytes ")[0] for rank, text in by_rank.items()}
        if len(set(sizes.values())) == 1:
            ranks = " and ".join(
                _on_hosts(ranks, identities) for ranks in ranks_by_value(by_rank).values()
            )
            parts.append(f"{name} has the same size but different content on {ranks}")
        else:
            texts = {rank: text.rpartition(" ")[0] or text for rank, text in by_rank.items()}
            parts += _difference(name, texts, identities, str)
    more = f" and {len(names) - LISTED:,} more files" if len(names) > LISTED else ""
    return (
        f"the files of the {kind} differ: {'; '.join(parts)}{more}. Copy the same files to all "
        "machines, or use shared storage"
    )


def differing_variables(identities: Sequence[RankIdentity]) -> list[str]:
    """Describe environment variables that differ between ranks, but should probably not."""
    names = sorted({name for identity in identities for name in identity.environment})
    return [
        line
        for name in names
        if not name.startswith(_PER_RANK_VARIABLES)
        for line in _difference(
            name,
            {rank: identity.environment.get(name) for rank, identity in enumerate(identities)},
            identities,
        )
    ]


def _difference(
    name: str,
    values: Mapping[int, Any],
    identities: Sequence[RankIdentity],
    as_text: Callable[[Any], str] = json.dumps,
) -> Iterator[str]:
    texts = {rank: "unset" if value is None else as_text(value) for rank, value in values.items()}
    by_value = ranks_by_value(texts)
    if len(by_value) > 1:
        parts = [f"{value} on {_on_hosts(ranks, identities)}" for value, ranks in by_value.items()]
        yield f"{name} differs: {', '.join(parts)}"


def _on_hosts(ranks: Sequence[int], identities: Sequence[RankIdentity]) -> str:
    hosts = sorted({identities[rank].host for rank in ranks})
    return f"{rank_names(ranks)} ({', '.join(hosts)})"
