"""The world of this process: rank, number of ranks, device and process group."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distmp.distributed import flight_recorder, rendezvous_store
from distmp.distributed.collectives import backends
from distmp.distributed.failing_together import Ranks
from distmp.distributed.rank_environment import (
    RankEnvironment,
    adopt_ranks,
    read_integer,
    wants_cpu,
)
from distmp.distributed.rendezvous_store import PrefixStore, Store
from distmp.errors import ConfigError, SetupError, require
from distmp.utils.generators import check_seed, seed_all


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
    """Compare the GPUs of all ranks; `device_count` is 1 if each rank sees only its own GPU."""
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


DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class World:
    """Rank, device and process group of this process.

    Attributes:
        rank: Global rank of this process, 0 to `world_size` - 1.
        world_size: Number of ranks.
        device: The device that this rank computes on.
        group: Process group of all ranks; None for a single process.

    Example:
        >>> import distmp
        >>> world = distmp.init(device="cpu")
        >>> world.rank, world.group is None
        (0, True)
    """

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def ranks(self) -> Ranks:
        """The ranks of the group, which act together or fail together."""
        return Ranks(self.group)

    @property
    def backend(self) -> str | None:
        """The backend that communicates tensors of `device`; None for a single process."""
        return None if self.group is None else backends(self.group).get(self.device.type)

    @classmethod
    def current(cls, device: torch.device | str | None = None) -> World:
        """Return the world of the default process group; a single process without one.

        Args:
            device: The device that this rank computes on. None uses the current CUDA device if
                there is one, "cuda" the current CUDA device.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = usable_device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if not dist.is_initialized():
            return cls(0, 1, device, None)
        return cls(dist.get_rank(), dist.get_world_size(), device, dist.group.WORLD)


def usable_device(device: torch.device | str) -> torch.device:
    """Return a device that tensors can be created on.

    Raises:
        ConfigError: If `device` is not a device of this machine.
    """
    try:
        if isinstance(device, bool | int):  # torch takes it as the index of a GPU
            raise TypeError
        requested = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError("device", device, "is not a device; use 'cpu', 'cuda' or None") from error
    if requested.type not in DEVICE_TYPES:
        raise ConfigError("device", str(device), "is not supported; use 'cpu', 'cuda' or None")
    if requested.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", str(device), "no GPU is available; use 'cpu' or None")
    if requested.index is not None and requested.type == "cuda":
        count = torch.cuda.device_count()
        problem = f"this machine has {count} GPUs; use cuda:0 to cuda:{count - 1}"
        require(requested.index < count, "device", str(device), problem)
    return requested


def local_device(local_rank: int) -> torch.device:
    """Return the device of a rank: the GPU of its local rank, or the CPU without GPUs.

    With fewer GPUs than ranks the ranks share them. `accelerate launch --cpu` selects the CPU.

    Raises:
        ConfigError: In a process that cannot use the GPU because it was forked.
    """
    if not torch.cuda.is_available() or wants_cpu(os.environ):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    problem = (
        "this process was forked from one that had used the GPU, so it cannot; start ranks with "
        "torchrun, or with the start method 'spawn' of torch.multiprocessing"
    )
    require(count > 0, "device", "cuda", problem)
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


# The arguments of the first call of `init`, by name, and whether it found or joined other ranks.
_choice: dict[str, Any] = {}


def init(device: torch.device | str | None = None, seed: int | None = None) -> World:
    """Set up this process for training; return its rank, the number of ranks and its device.

    Under torchrun, or another launcher that sets its variables, the default process group is
    initialized if it does not exist. Otherwise the process trains alone. `Engine` and `DataLoader`
    do the same by themselves, and use the device of this call. A further call returns the same
    world, and does not seed again, unless the process group was destroyed in between.

    Args:
        device: The device of this rank; None uses the GPU of its local rank if there is one.
        seed: Seeds torch, numpy and Python's `random`, with the same value on every rank, so that
            all ranks build the same model. In the steps of an engine, ranks draw different
            random numbers. None leaves the generators unchanged.

    Raises:
        ConfigError: If the device or the seed is invalid or another one than in the first call, or
            if a launcher has started several processes that this one cannot join.
        SetupError: If the other ranks did not connect.

    Example:
        >>> import distmp
        >>> world = distmp.init(device="cpu", seed=0)
        >>> world.rank, world.world_size, str(world.device)
        (0, 1, 'cpu')
    """
    global _choice
    asked = {"device": None if device is None else str(usable_device(device)), "seed": seed}
    if _choice and (not _choice["joined"] or dist.is_initialized()):
        world = world_of_process()
        _check_repeated(asked, world)
        _choice["joined"] |= world.group is not None
        return world
    if seed is not None:
        check_seed(seed)
    world = world_of_process(device)
    _choice = {**asked, "joined": world.group is not None}
    if seed is not None:
        seed_all(seed)
    return world


def _check_repeated(asked: Mapping[str, Any], world: World) -> None:
    for name, now in asked.items():
        problem = f"the first call of distmp.init had {name} = {_choice[name]!r}; pass it there"
        known = now in (None, _choice[name]) or (name == "device" and now == str(world.device))
        require(known, name, now, problem)


def world_of_process(device: torch.device | str | None = None) -> World:
    """Return the world of this process; initialize the default process group if necessary.

    If torchrun (or another launcher that sets its variables) has started several processes and the
    default process group does not exist, it is initialized, and destroyed when the process ends.

    Args:
        device: The device that this rank computes on; None uses that of `init`, or else the GPU of
            its local rank if there is one.

    Raises:
        ConfigError: If a launcher has started several processes that this one cannot join.
        AttemptError: If some of the ranks did not start.
        SetupError: If the other ranks did not connect.
    """
    device = _choice.get("device") if device is None else device
    adopt_ranks()
    if dist.is_initialized():
        _check_group()
        return World.current(_device_of_rank(device, int(os.environ.get("LOCAL_RANK", 0))))
    environment = RankEnvironment.from_variables()
    if "RANK" not in os.environ:
        return World.current(_device_of_rank(None, 0) if device is None else device)
    own_device = _device_of_rank(device, environment.local_rank)
    try:
        _initialize_group(environment, own_device)
    except dist.DistError as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        message = (
            f"rank {environment.rank} could not join the {environment.world_size} ranks of "
            f"WORLD_SIZE at {address} (MASTER_ADDR, MASTER_PORT): {error}"
        )
        raise SetupError({0: message}, exit_code=1) from error
    atexit.register(_leave_at_exit)
    return World.current(own_device)


def join(
    environment: RankEnvironment,
    *,
    timeout_seconds: float,
    on_store: Callable[[], object] = lambda: None,
) -> World:
    """Initialize the default process group if a launcher started ranks; return the world.

    Args:
        environment: Rank and world size of this process.
        timeout_seconds: Timeout of a collective.
        on_store: Called when all ranks have started and share a store, before they connect.
    """
    device = local_device(environment.local_rank)
    if "RANK" in os.environ:
        _initialize_group(environment, device, timeout_seconds, on_store)
    else:
        on_store()
    return World.current(device)


def _initialize_group(
    environment: RankEnvironment,
    device: torch.device,
    timeout_seconds: float | None = None,
    on_store: Callable[[], object] = lambda: None,
) -> None:
    _check_address(environment.world_size)
    store = rendezvous_store.for_this_start(timeout_seconds)
    # Otherwise ranks read the addresses of a group that was destroyed.
    store = PrefixStore(f"group {store.add(f'groups of rank {environment.rank}', 1)}", store)
    on_store()
    flight_recorder.enable()
    dist.init_process_group(
        **backend_for(device, store, environment.world_size),
        store=store,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timedelta(seconds=timeout_seconds) if timeout_seconds else None,
    )


def _device_of_rank(device: torch.device | str | None, local_rank: int) -> torch.device:
    """Return the requested device; None and "cuda" select the GPU of this rank.

    A GPU becomes the current device, which FSDP computes on.
    """
    if device is not None:
        requested = usable_device(device)
        if requested.type == "cuda" and requested.index is not None:
            torch.cuda.set_device(requested)
        if requested.type != "cuda" or requested.index is not None:
            return requested
    if torch.cuda.is_available() and torch.cuda.current_device() != 0:
        return torch.device("cuda", torch.cuda.current_device())  # the script has set it
    return local_device(local_rank)


def _check_address(world_size: int) -> None:
    problem = (
        f"is not set, so this rank cannot join the {world_size} ranks of WORLD_SIZE; start the "
        "script with torchrun, or call torch.distributed.init_process_group first"
    )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        require(name in os.environ, name, None, problem)
    port = read_integer(os.environ, "MASTER_PORT")
    lowest = 0 if world_size == 1 else 1  # one rank may listen on any free port
    require(lowest <= port < 2**16, "MASTER_PORT", port, "must be a port, from 1 to 65535")


def _check_group() -> None:
    """Refuse a group of one rank if a launcher has started several processes."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    problem = (
        "several ranks were started, but the default process group of torch.distributed has only "
        "this one; initialize it with all of them, or set WORLD_SIZE=1 for processes that train "
        "independently"
    )
    complete = world_size == "1" or dist.get_world_size() > 1
    require(complete, "WORLD_SIZE", world_size, problem)


def leave() -> None:
    """Destroy the default process group, if there is one, and forget the arguments of `init`.

    Modules of torch's DDP cannot train afterwards.
    """
    global _choice
    _choice = {}
    if dist.is_initialized():
        _release_reducers()
        dist.destroy_process_group()


def leave_after_error() -> None:
    """Leave the ranks, unless that could wait for ranks that have ended.

    Destroying a group of NCCL waits for kernels, which wait for the other ranks. It ends with the
    process.
    """
    if not (dist.is_initialized() and "nccl" in backends(dist.group.WORLD).values()):
        leave()


def _leave_at_exit() -> None:
    # Set by an exception that ended the script.
    failed = getattr(sys, "last_value", None) is not None
    (leave_after_error if failed else leave)()


def _release_reducers() -> None:
    """Free what DDP modules hold of the group, so that none has the last reference to it.

    A reference from Python is safe: its release unlocks the interpreter.
    """
    for part in gc.get_objects():
        if issubclass(type(part), DistributedDataParallel):  # isinstance may run code of users
            part.__dict__.update(reducer=None, logger=None)
