"""Seeds default random generators for other code, and restores them."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from distmp.errors import ConfigError
from distmp.utils import LARGEST_SEED


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restore the default generators of torch, numpy and Python at the end.

    Args:
        device: Device whose generator of torch is restored, too, besides that of the CPU:
            `torch.manual_seed` seeds all devices.
    """
    generators = restorers(device)
    try:
        yield
    finally:
        for restore in generators:
            restore()


def restorers(device: torch.device | None = None) -> list[Callable[[], object]]:
    """Return functions that restore the generators of `generators_kept` as they are now.

    Args:
        device: As of `generators_kept`.
    """
    found: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state(legacy=False)),  # a tuple takes longer
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if device is not None and device.type == "cuda":
        found.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device))
    return found


def generator_states() -> bytes:
    """Return the states of the generators that `generators_kept` restores, to compare them."""
    torch_state = torch.get_rng_state().numpy()
    return pickle.dumps((random.getstate(), np.random.get_state(), torch_state))


def seed_generators(key: str, device: torch.device | None = None) -> None:
    """Seed the default generators of torch on the CPU, numpy and Python.

    Args:
        key: Determines the seeds.
        device: Device whose generator of torch is seeded, too.
    """
    digest = hashlib.sha256(key.encode()).digest()
    seed = int.from_bytes(digest[:8], "big")
    # Not `torch.manual_seed`, which seeds all devices and takes 100 times as long.
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    random.seed(digest[12:])


def check_seed(seed: object) -> None:
    """Refuse a seed that is not an integer from 0 to `LARGEST_SEED`.

    Raises:
        ConfigError: With the value received.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= LARGEST_SEED:
        raise ConfigError("seed", seed, f"must be an integer from 0 to {LARGEST_SEED}")


def seed_all(seed: int) -> None:
    """Seed the default generators of torch on all devices, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # it takes no others
    random.seed(seed)
