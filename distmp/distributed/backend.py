"""Selects the backend of the default process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from distmp.distributed.rendezvous_store import PrefixStore

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


def backend_for(device: torch.device, store: Store, world_size: int) -> dict[str, Any]:
    """Return the backend for `init_process_group`, and the device that it is bound to, if any.

    NCCL communicates CUDA tensors if every rank has its own GPU. Gloo communicates CPU tensors, and
    CUDA tensors of ranks that share a GPU, which NCCL does not support. All ranks have to call it,
    and get the same backend.

    Args:
        device: The device that this rank computes on.
        store: A store of all ranks, in which no other attempt uses the prefix "devices".
        world_size: Number of ranks.
    """
    if _all_have_own_gpu(device, PrefixStore("devices", store), world_size):
        return {"backend": "cpu:gloo,cuda:nccl", "device_id": device}
    return {"backend": "gloo", "device_id": None}


def _all_have_own_gpu(device: torch.device, store: Store, world_size: int) -> bool:
    """Compare the GPUs of all ranks: `device_count` differs from their number if each sees one."""
    if not _has_own_gpu(device, store):
        store.add("without own GPU", 1)
    if store.add("ranks", 1) == world_size:
        store.set("result", str(store.add("without own GPU", 0)))
    return store.get("result") == b"0"


def _has_own_gpu(device: torch.device, store: Store) -> bool:
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    # NCCL does not support several ranks on the MIG slices of a GPU either.
    return store.add(str(properties.uuid), 1) == 1 and " MIG " not in properties.name
