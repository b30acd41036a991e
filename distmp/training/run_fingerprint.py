"""What a checkpoint says about the run that wrote it, and whether another run may go on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distmp.config import RunConfig
from distmp.data.build import Datasets
from distmp.data.identity import identity
from distmp.distributed.world import World
from distmp.precision import PrecisionPolicy
from distmp.precision.notation import as_text
from distmp.training.resume_compat import Changes, compare
from distmp.utils.environment_info import versions
from distmp.utils.settings import current_name, former_names, leaf_names, to_mapping
from distmp.utils.settings.flat import digest, flat

# What is compared besides settings, and how it is called.
FACTS = {
    ("data", "samples"): "samples in the data",
    ("data", "vocabulary"): "vocabulary of the data",
    ("data", "digest"): "digest of the data",
    ("ranks", "number"): "number of ranks",
    ("ranks", "device"): "device",
    ("ranks", "precision"): "precision in force",
    ("versions", "distmp"): "version of distmp",
    ("versions", "torch"): "version of torch",
    ("versions", "python"): "version of Python",
}


def origin(
    config: RunConfig, datasets: Datasets, world: World, policy: PrecisionPolicy
) -> dict[str, Any]:
    """Return what a checkpoint notes about its run, as JSON can hold it.

    Args:
        config: The resolved configuration.
        datasets: What it trains on.
        world: Its ranks.
        policy: The precision policy in force.
    """
    configuration, found = as_numbers(config), versions()
    return {
        "configuration": configuration,
        "configuration_hash": digest(configuration),
        "data": identity(datasets),
        "ranks": {
            "number": world.world_size,
            "device": world.device.type,
            "precision": as_text(policy),
        },
        "versions": {name: found[name] for name in ("distmp", "torch", "python")},
    }


def as_numbers(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as nested dictionaries that JSON gives back unchanged."""
    found: dict[str, Any] = json.loads(json.dumps(to_mapping(config), default=str))
    return found


def changes_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Compare a run with the one that wrote a checkpoint.

    Args:
        before: The numbers in the checkpoint, what `origin` returned among them.
        now: What `origin` returns for the run that goes on.
    """
    if "configuration" not in before:
        return Changes(note="the checkpoint is too old to tell its configuration: none is compared")
    leaves = frozenset(leaf_names(RunConfig))
    former = former_names(RunConfig)
    settings_before = {
        current_name(name, former): value
        for name, value in flat(before["configuration"], leaves).items()
    }
    facts_before, facts_now = _facts(before), _facts(now)
    known = [name for name in facts_now if name in facts_before]
    return compare(
        settings_before | {name: facts_before[name] for name in known},
        flat(now["configuration"], leaves) | {name: facts_now[name] for name in known},
        defaults=flat(as_numbers(RunConfig()), leaves),
    )


def _facts(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known besides settings, by the names of `changes`."""
    found = {name: numbers.get(section, {}).get(key) for (section, key), name in FACTS.items()}
    return {name: value for name, value in found.items() if value is not None}
