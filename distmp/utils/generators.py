"""Seeds default random generators for other code, and restores them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from distmp.errors import ConfigError


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Restore the default generators of torch, numpy and Python at the end.

    Args:
        device: Device whose generator of torch is restored, too, besides that of the CPU:
            `torch.manual_seed` seeds all devices.
    """
    before = np.random.get_state(legacy=False), random.getstate()  # as a tuple takes longer
    on_cpu = device is None or device.type == "cpu"
    try:
        with torch.random.fork_rng(
            devices=[] if on_cpu else [device],
            device_type="cuda" if device is None or on_cpu else device.type,
        ):
            yield
    finally:
        np.random.set_state(before[0])
        random.setstate(before[1])


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
    """Refuse a seed that the generators of torch, numpy and Python do not all take.

    Raises:
        ConfigError: With the value received.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ConfigError("seed", seed, "must be an integer from 0 to 2**32 - 1")


def seed_all(seed: int) -> None:
    """Seed the default generators of torch on all devices, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
